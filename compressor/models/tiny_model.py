"""A tiny model with the configuration of a large model: the same positions, windows and types of layers, few heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from compressor.model_folder.text_limits import text_config
from compressor.models.pooled_encoder import ModuleReranker, SentenceEncoder

_HEADS, _LAYERS, _INNER = 2, 2, 32
_LAYER_COUNTS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "n_layer", "num_layers")
_HEAD_COUNTS = (
    *("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head", "num_heads"),
    "num_key_value_heads",
)
_WIDTHS = ("hidden_size", "d_model", "n_embd")
_INNER_WIDTHS = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "moe_intermediate_size")
_SCALE = 0.2
"""Standard deviation of the weights, large enough for attention to depend on its inputs."""


def tiny_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """A tiny random model with the class and configuration of a model; None if the class cannot be so small.

    It has a layer of every type. For a sentence encoder or a reranker of modules it is an encoder.
    """
    if isinstance(model, SentenceEncoder | ModuleReranker):
        model = model.encoder
    config = copy.deepcopy(model.config)
    _shrink(text_config(config))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tiny: PreTrainedModel = type(model)(config)
            for parameter in tiny.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=_SCALE)
    except Exception:  # a class may need sizes that its configuration derives from changed sizes
        return None
    return tiny.float().eval()


def _shrink(config: PretrainedConfig) -> None:
    """Change a configuration to few small layers."""
    heads = next((getattr(config, name) for name in _HEAD_COUNTS if _is_size(config, name)), 1)
    width = next((getattr(config, name) for name in _WIDTHS if _is_size(config, name)), heads)
    head_dim = getattr(config, "head_dim", None) or width // heads
    count = next((getattr(config, name) for name in _LAYER_COUNTS if _is_size(config, name)), 1)
    by_layer = {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count and count > 1
    }
    kept = _layers_of_every_kind(list(zip(*by_layer.values(), strict=True)), count)
    values: dict[str, Any] = {name: [value[layer] for layer in kept] for name, value in by_layer.items()}
    values |= dict.fromkeys(_LAYER_COUNTS, len(kept)) | dict.fromkeys(_INNER_WIDTHS, _INNER)
    values |= dict.fromkeys(_HEAD_COUNTS, _HEADS) | dict.fromkeys(_WIDTHS, _HEADS * head_dim)
    for name, value in values.items():
        if isinstance(value, list) or _is_size(config, name):
            setattr(config, name, value)


def _layers_of_every_kind(kinds: Sequence[Any], count: int) -> list[int]:
    """The first layer of each kind, and further layers up to `_LAYERS`."""
    first = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    further = [layer for layer in range(count) if layer not in first]
    return sorted([*first, *further[: max(0, min(_LAYERS, count) - len(first))]])


def _is_size(config: PretrainedConfig, name: str) -> bool:
    value = getattr(config, name, None)
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
