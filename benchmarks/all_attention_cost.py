"""What heads are worth in All-attention and in Transformer-XL: figure 1 of Shim et al. 2021, computed."""

from __future__ import annotations

import functools
from typing import Any

import torch

from compressor.models import AllAttentionConfig, AllAttentionForCausalLM, TransformerXLConfig, TransformerXLForCausalLM
from compressor.study import figures
from compressor.study.findings import Picture


def layer_macs(kept: int, heads: int, width: int, inner: int, segment: int, *, persistent: bool) -> int:
    """Multiply-accumulates of a layer over one segment with a memory as long, `kept` of `heads` heads left.

    Args:
        inner: persistent vectors a head, or the feed-forward layer's width.
        persistent: which of the two.
    """
    head, keys = width // heads, 2 * segment
    projections = (2 * segment + 3 * keys) * width * head  # query and output; key, value and position
    scores = segment * head * (2 * keys + keys)  # content and position; then values
    persistents = 2 * segment * inner * head if persistent else 0
    return kept * (projections + scores + persistents) + (0 if persistent else 2 * segment * width * inner)


def figure1() -> Picture:
    """Share of multiply-accumulates and of parameters that is left, at the paper's width, heads and segment."""
    width, heads, inner, segment = 512, 8, 2048, 192
    left: dict[str, dict[str, list[tuple[float, float]]]] = {"% of MACs left": {}, "% of parameters left": {}}
    for name, persistent in (("All-attention", True), ("Transformer-XL", False)):
        counts = range(1, heads + 1)
        macs = {kept: layer_macs(kept, heads, width, inner, segment, persistent=persistent) for kept in counts}
        sizes = {kept: _parameters(kept, width, heads, inner, persistent=persistent) for kept in counts}
        for told, values in zip(left, (macs, sizes), strict=True):
            line = [(100 * (1 - kept / heads), 100 * value / values[heads]) for kept, value in values.items()]
            left[told][name] = line
    half = [
        f"{line[heads // 2 - 1][1]:.0f}{told} in {name}" for told, lines in left.items() for name, line in lines.items()
    ]
    sizes_told = f"width {width}, {heads} heads, {inner} vectors or units, segment {segment}"
    told = f"Computed at {sizes_told}. At half: {', '.join(half)}."
    figure = figures.curves(list(left.items()), "heads dropped, %")
    return Picture("figure1", "What dropped heads take along", told, figure, wide=True)


@functools.cache
def _parameters(kept: int, width: int, heads: int, inner: int, *, persistent: bool) -> int:
    """Parameters of one layer of the implementation."""
    shared: dict[str, Any] = {
        "vocab_size": 2,
        "hidden_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "layer_heads": [list(range(kept))],
    }
    with torch.device("meta"):
        model = (
            AllAttentionForCausalLM(AllAttentionConfig(num_persistent=inner, **shared))
            if persistent
            else TransformerXLForCausalLM(TransformerXLConfig(intermediate_size=inner, **shared))
        )
    return sum(weight.numel() for weight in model.model.layers.parameters())
