"""Beam search with an encoder-decoder, run by PyTorch (gated or not) or by an engine."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Forward


def beam_search(model: PreTrainedModel, forward: Forward, batch: dict[str, Tensor], beams: int, longest: int) -> Tensor:
    """The best target of each source, ids `[batch, tokens]`, by the beam search of transformers.

    Every step runs `forward` on the whole sources and on the whole targets generated so far, as an engine without a
    key/value cache requires. Therefore targets of PyTorch and of engines are comparable.

    Args:
        model: provides special tokens, length penalty and the like; it is not run.
        forward: (input_ids, attention_mask, decoder_input_ids) to logits `[batch, target, vocabulary]`.
        batch: input_ids and attention_mask, `[batch, source]`.
        beams: hypotheses kept per source.
        longest: maximum number of tokens of a target.
    """
    settings = copy.deepcopy(model.generation_config)
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
        if getattr(settings, name) is None:  # an old generation_config.json may lack them
            setattr(settings, name, getattr(model.config, name, None))
    settings.update(num_beams=beams, do_sample=False, max_new_tokens=longest, max_length=None)
    settings.update(use_cache=False, num_return_sequences=1, return_dict_in_generate=False)
    generator: Any = _Generator(model, forward)
    with torch.no_grad(), quiet_transformers():
        ids: Tensor = generator.generate(**batch, generation_config=settings)
    return ids


class _Generator(GenerationMixin):
    """The model that `generate` requires; each step calls `forward` once."""

    main_input_name = "input_ids"
    base_model_prefix = "model"
    input_modalities = ("text",)
    device = torch.device("cpu")
    dtype = torch.float32
    _is_stateful = False

    def __init__(self, model: PreTrainedModel, forward: Forward) -> None:
        self.config, self.generation_config = model.config, model.generation_config
        self._forward = forward

    def __call__(self, **inputs: Any) -> Seq2SeqLMOutput:
        return self.forward(**inputs)

    def forward(
        self, decoder_input_ids: Tensor, attention_mask: Tensor, encoder_outputs: BaseModelOutput, **unused: Any
    ) -> Seq2SeqLMOutput:
        assert encoder_outputs.last_hidden_state is not None
        batch = {"input_ids": encoder_outputs.last_hidden_state[..., 0], "attention_mask": attention_mask}
        logits = self._forward({**batch, "decoder_input_ids": decoder_input_ids})
        return Seq2SeqLMOutput(logits=torch.from_numpy(logits[:, -1:]))

    def get_encoder(self) -> nn.Module:
        return _IdentityEncoder()

    def is_remote_code(self) -> bool:
        return False


class _IdentityEncoder(nn.Module):
    """An encoder that returns the ids of the source, which `generate` repeats for every beam."""

    def forward(self, input_ids: Tensor, **unused: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=input_ids[..., None])
