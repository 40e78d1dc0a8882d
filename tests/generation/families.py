"""Tiny random models that generate, of families that `tests.zoo` lacks too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from tests.zoo import FAMILIES as ZOO
from tests.zoo import VOCABULARY, Case, pair, text

_USUAL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LENGTHS = {"max_position_embeddings": 70}
_LLAMA = {**_USUAL, **_LENGTHS, "intermediate_size": 44, "num_key_value_heads": 2}


def _family(model: type, config: type, inputs: Callable[[], Mapping[str, Tensor]], **sizes: Any) -> Callable[[], Case]:
    def make() -> Case:
        torch.manual_seed(0)
        network: PreTrainedModel = model(config(pad_token_id=0, **sizes)).eval()
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return network, dict(inputs())

    return make


FAMILIES: dict[str, Callable[[], Case]] = {
    **{name: functools.partial(ZOO[name], 0) for name in ("gpt2", "llama", "qwen3", "t5", "bart", "marian", "whisper")},
    "gemma2": _family(hf.Gemma2ForCausalLM, hf.Gemma2Config, text, **_LLAMA, head_dim=8, sliding_window=4),
    "mistral": _family(hf.MistralForCausalLM, hf.MistralConfig, text, **_LLAMA, sliding_window=4),
    "bloom": _family(
        hf.BloomForCausalLM, hf.BloomConfig, text, vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4
    ),
    "phi": _family(
        hf.PhiForCausalLM, hf.PhiConfig, text, **{**_USUAL, "hidden_size": 128}, **_LENGTHS, intermediate_size=44
    ),
    "opt": _family(hf.OPTForCausalLM, hf.OPTConfig, text, **_USUAL, **_LENGTHS, ffn_dim=44, word_embed_proj_dim=32),
    "pegasus": _family(
        hf.PegasusForConditionalGeneration,
        hf.PegasusConfig,
        pair,
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=44,
        decoder_ffn_dim=44,
        **_LENGTHS,
    ),
}
"""Name -> makes a model that generates, with inputs of it."""
