"""Compute the cost of heads in All-attention and in Transformer-XL: figure 1 of Shim et al. 2021.

    python -m benchmarks.all_attention_cost

Multiply-accumulates and parameters are those of one layer, without embedding and logits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks.speed import table
from benchmarks.studies import figures
from benchmarks.studies.findings import Picture
from compressor.models import AllAttentionConfig, AllAttentionForCausalLM, TransformerXLConfig, TransformerXLForCausalLM


def layer_macs(kept: int, heads: int, width: int, inner: int, segment: int, *, persistent: bool) -> int:
    """Multiply-accumulates of a layer over one segment with a memory of the same length.

    Args:
        kept: heads of the layer.
        heads: heads of a dense layer.
        width: width of the model.
        inner: persistent vectors per head, or the width of the feed-forward layer.
        segment: positions of the segment.
        persistent: whether `inner` is a number of persistent vectors (All-attention).
    """
    head, keys = width // heads, 2 * segment
    projections = (2 * segment + 3 * keys) * width * head  # query and output; key, value and position
    scores = segment * head * (2 * keys + keys)  # content and position; then values
    persistents = 2 * segment * inner * head if persistent else 0
    return kept * (projections + scores + persistents) + (0 if persistent else 2 * segment * width * inner)


WIDTH, HEADS, INNER, SEGMENT = 512, 8, 2048, 192
"""Sizes of a layer in the paper, for words."""
SIZES = f"width {WIDTH}, {HEADS} heads, {INNER} vectors or units, segment and memory {SEGMENT}"

Lines = dict[str, dict[str, list[tuple[float, float]]]]
"""Quantity -> architecture -> points (percentage of heads dropped, percentage of the quantity that remains)."""


def lines() -> Lines:
    """Shares of multiply-accumulates and of parameters that remain, at the sizes of the paper."""
    width, heads, inner, segment = WIDTH, HEADS, INNER, SEGMENT
    remaining: Lines = {"% of MACs left": {}, "% of parameters left": {}}
    for name, persistent in (("All-attention", True), ("Transformer-XL", False)):
        counts = range(1, heads + 1)
        macs = {kept: layer_macs(kept, heads, width, inner, segment, persistent=persistent) for kept in counts}
        sizes = {kept: _parameters(kept, width, heads, inner, persistent=persistent) for kept in counts}
        for quantity, values in zip(remaining, (macs, sizes), strict=True):
            line = [(100 * (1 - kept / heads), 100 * value / values[heads]) for kept, value in values.items()]
            remaining[quantity][name] = line
    return remaining


def figure1() -> Picture:
    """The lines as a picture."""
    quantities = lines()
    half = [
        f"{line[HEADS // 2 - 1][1]:.0f}{quantity} in {name}"
        for quantity, architectures in quantities.items()
        for name, line in architectures.items()
    ]
    description = f"Computed at {SIZES}. At half: {', '.join(half)}."
    figure = figures.curves(list(quantities.items()), "heads dropped, %")
    return Picture("figure1", "What dropped heads take along", description, figure, wide=True)


@functools.cache
def _parameters(kept: int, width: int, heads: int, inner: int, *, persistent: bool) -> int:
    """Parameters of one layer of `compressor.models`."""
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


def main() -> None:
    """Print the lines as a table."""
    columns = {
        f"{quantity} in {name}": line
        for quantity, architectures in lines().items()
        for name, line in architectures.items()
    }
    rows = [
        {"heads dropped": f"{dropped:g}%", **{name: f"{line[index][1]:.1f}" for name, line in columns.items()}}
        for index, (dropped, _) in reversed(list(enumerate(next(iter(columns.values())))))
    ]
    print("command: python -m benchmarks.all_attention_cost")
    print(f"computed for a layer over one segment, {SIZES}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
