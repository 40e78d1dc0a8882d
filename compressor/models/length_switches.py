"""The lengths at which a configuration lets a model change: those of windows, chunks, blocks, chosen keys and rotary
embeddings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from compressor.models.rotary import DYNAMIC, extension
from compressor.models.text_config import text_config

_REACH = re.compile(r"(sliding_|attention_)?window(_size)?|local_(attention|radius)|\w*chunk_(size|length)")
"""Names of configuration entries that hold a number of positions."""
_PARTIAL = ("sliding", "chunk", "local", "window", "linear", "mamba", "conv")
"""Words of the types of layers to which such an entry may apply."""
_CHOSEN = "index_topk"
"""Name of the entry with the number of keys up to which sparse attention sees all."""


def configured_switches(config: PretrainedConfig) -> tuple[int, ...]:
    """Lengths in tokens after which a model may compute something else, ascending.

    Windows to both sides have half of their width on each side, so that both numbers are among the lengths.
    """
    sizes = set(_sizes(text_config(config)))
    return tuple(sorted(sizes | {size // 2 for size in sizes if size > 3}))


def chosen_keys(config: PretrainedConfig) -> int | None:
    """The number of keys that sparse attention chooses by scores; None: it attends to all."""
    chosen: Any = getattr(text_config(config), _CHOSEN, None)
    return chosen if _is_reach(chosen) else None


def _sizes(config: PretrainedConfig) -> Iterator[int]:
    """The numbers of positions among the entries of a configuration that its layers use."""
    layers = getattr(config, "layer_types", None) or ()
    if not layers or any(word in layer for layer in layers for word in _PARTIAL):
        for name in (name for name in vars(config) if _REACH.fullmatch(name)):
            value = getattr(config, name)
            yield from (size for size in (value if isinstance(value, list | tuple) else [value]) if _is_reach(size))
    if (chosen := chosen_keys(config)) is not None:
        yield chosen
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    usual = getattr(config, "original_max_position_embeddings", None)
    for part in (part for part in kinds if part.get("rope_type") == "longrope"):
        size: Any = part.get("original_max_position_embeddings", usual)
        if _is_reach(size):
            yield size
    if any(part.get("rope_type") == DYNAMIC for part in kinds) and extension(config) > 1:
        yield config.max_position_embeddings
    drawn, block = getattr(config, "num_random_blocks", None), getattr(config, "block_size", None)
    if drawn is not None and block is not None and getattr(config, "attention_type", None) == "block_sparse":
        yield (5 + 2 * drawn) * block


def _is_reach(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 1
