"""Beam search by transformers' `generate`, with forwards of a PyTorch model or of an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from compressor.graph.signature import generator_of
from compressor.models.forwards import arrays_of, tensors_of
from compressor.silence_libraries import quiet_transformers

Forward = Callable[[dict[str, np.ndarray]], np.ndarray]


def beam_search(
    model: PreTrainedModel, forward: Forward, batch: Mapping[str, np.ndarray], beams: int, longest: int
) -> np.ndarray:
    """The best target of each source, ids `[batch, tokens]`, by the beam search of transformers.

    Models and engines with key/value caches generate with them. Where an engine has none, each token takes a forward of
    the whole sources and of all tokens generated so far.

    Args:
        model: has special tokens, length penalty and the like; it runs only where it is what `forward` runs.
        forward: a model or an engine, (input_ids, attention_mask, decoder_input_ids) to logits
            `[batch, target, vocabulary]`.
        batch: input_ids and attention_mask, `[batch, source]`.
        beams: hypotheses kept per source.
        longest: maximum number of tokens of a target.
    """
    if (generator := generator_of(forward, model)) is None:
        return _search(_Generator(model, forward), model, batch, beams, longest, cached=False)
    return _search(generator, model, batch, beams, longest)


def greedy_search(model: PreTrainedModel, batch: Mapping[str, np.ndarray], longest: int) -> np.ndarray:
    """The most likely token after each token, ids `[batch, tokens]`; see `beam_search`."""
    return _search(model, model, batch, 1, longest)


def _search(
    generator: Any,
    model: PreTrainedModel,
    batch: Mapping[str, np.ndarray],
    beams: int,
    longest: int,
    *,
    cached: bool = True,
) -> np.ndarray:
    """Ids `[batch, tokens]` by the `generate` of a model or an engine, with or without its cache."""
    settings = generation_settings(model, beams, longest)
    settings.use_cache = cached
    # A cache that transformers makes has the layers of the encoder, which may be fewer.
    cache = {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())} if cached else {}
    inputs = tensors_of(batch, generator.device)
    with torch.no_grad(), quiet_transformers():
        ids: Tensor = generator.generate(**inputs, **cache, generation_config=settings)
    return ids.cpu().numpy()


def decoder_inputs(model: Any, labels: np.ndarray) -> np.ndarray:
    """The inputs of a decoder for targets `[batch, target]` (-100: padding), shifted as the model shifts them."""
    ids: Tensor = model.prepare_decoder_input_ids_from_labels(labels=torch.from_numpy(labels))
    return ids.numpy()


def generation_settings(model: PreTrainedModel, beams: int, longest: int) -> GenerationConfig:
    """The settings of a model, such as its special tokens, for a search without sampling.

    It keeps `beams` hypotheses per source, and generates at most `longest` tokens.
    """
    settings = copy.deepcopy(model.generation_config)
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
        if getattr(settings, name) is None:  # an old generation_config.json may lack them
            setattr(settings, name, getattr(model.config, name, None))
    settings.update(num_beams=beams, do_sample=False, max_new_tokens=longest, max_length=None)
    settings.update(num_return_sequences=1, return_dict_in_generate=False)
    return settings


class _Generator(GenerationMixin):
    """An engine without caches as the model that `generate` requires; each token takes a call of `forward`."""

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
