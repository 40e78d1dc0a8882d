"""Beam search by transformers' `generate`, with forwards of a PyTorch model or of an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from compressor.models.forwards import arrays_of, tensors_of
from compressor.silence_libraries import quiet_transformers

Forward = Callable[[dict[str, np.ndarray]], np.ndarray]


def beam_search(
    model: PreTrainedModel, forward: Forward, batch: Mapping[str, np.ndarray], beams: int, longest: int
) -> np.ndarray:
    """The best target of each source, ids `[batch, tokens]`, by the beam search of transformers.

    Each token takes a forward of the whole sources and of all tokens generated so far, as an engine without key/value
    cache requires, so that targets of PyTorch and of engines are comparable.

    Args:
        model: has special tokens, length penalty and the like; it is not run.
        forward: (input_ids, attention_mask, decoder_input_ids) to logits `[batch, target, vocabulary]`.
        batch: input_ids and attention_mask, `[batch, source]`.
        beams: hypotheses kept per source.
        longest: maximum number of tokens of a target.
    """
    generator: Any = _Generator(model, forward)
    with torch.no_grad(), quiet_transformers():
        settings = generation_settings(model, beams, longest)
        ids: Tensor = generator.generate(**tensors_of(batch), generation_config=settings)
    return ids.numpy()


def greedy_search(model: PreTrainedModel, batch: Mapping[str, np.ndarray], longest: int) -> np.ndarray:
    """The most likely token after each token, ids `[batch, tokens]`, generated with a cache; see `beam_search`."""
    settings = generation_settings(model, beams=1, longest=longest)
    settings.use_cache = True
    with torch.no_grad(), quiet_transformers():
        ids: Tensor = model.generate(**tensors_of(batch), generation_config=settings)  # type: ignore[operator]
    return ids.numpy()


def decoder_inputs(model: Any, labels: np.ndarray) -> np.ndarray:
    """The inputs of a decoder for targets `[batch, target]` (-100: padding), shifted as the model shifts them."""
    ids: Tensor = model.prepare_decoder_input_ids_from_labels(labels=torch.from_numpy(labels))
    return ids.numpy()


def generation_settings(model: PreTrainedModel, beams: int, longest: int) -> GenerationConfig:
    """The settings of a model, such as its special tokens, for a search without sampling and without a cache.

    It keeps `beams` hypotheses per source, and generates at most `longest` tokens.
    """
    settings = copy.deepcopy(model.generation_config)
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
        if getattr(settings, name) is None:  # an old generation_config.json may lack them
            setattr(settings, name, getattr(model.config, name, None))
    settings.update(num_beams=beams, do_sample=False, max_new_tokens=longest, max_length=None)
    settings.update(use_cache=False, num_return_sequences=1, return_dict_in_generate=False)
    return settings


class _Generator(GenerationMixin):
    """The model that `generate` requires; each token takes a call of `forward`."""

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
        logits = self._forward(arrays_of({**batch, "decoder_input_ids": decoder_input_ids}))
        return Seq2SeqLMOutput(logits=torch.from_numpy(logits[:, -1:]))

    def get_encoder(self) -> nn.Module:
        return _IdentityEncoder()

    def is_remote_code(self) -> bool:
        return False


class _IdentityEncoder(nn.Module):
    """An encoder that returns the ids of the source, which `generate` repeats for every beam."""

    def forward(self, input_ids: Tensor, **unused: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=input_ids[..., None])
