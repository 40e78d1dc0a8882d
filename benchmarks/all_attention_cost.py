"""What heads are worth in All-attention and in Transformer-XL: figure 1 of Shim et al. 2021, computed.

    python -m benchmarks.all_attention_cost

Multiply-accumulates and parameters are a layer's, without the embedding and the logits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks.speed import table
from compressor.models import AllAttentionConfig, AllAttentionForCausalLM, TransformerXLConfig, TransformerXLForCausalLM
from compressor.studies import figures
from compressor.studies.results import Picture


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


WIDTH, HEADS, INNER, SEGMENT = 512, 8, 2048, 192
"""Of a layer in the paper, for words."""
SIZES = f"width {WIDTH}, {HEADS} heads, {INNER} vectors or units, segment and memory {SEGMENT}"

Lines = dict[str, dict[str, list[tuple[float, float]]]]
"""Of each quantity and architecture, percents of the heads dropped and of the quantity left."""


def lines() -> Lines:
    """Share of multiply-accumulates and of parameters that is left, at the paper's width, heads and segment."""
    width, heads, inner, segment = WIDTH, HEADS, INNER, SEGMENT
    left: Lines = {"% of MACs left": {}, "% of parameters left": {}}
    for name, persistent in (("All-attention", True), ("Transformer-XL", False)):
        counts = range(1, heads + 1)
        macs = {kept: layer_macs(kept, heads, width, inner, segment, persistent=persistent) for kept in counts}
        sizes = {kept: _parameters(kept, width, heads, inner, persistent=persistent) for kept in counts}
        for told, values in zip(left, (macs, sizes), strict=True):
            line = [(100 * (1 - kept / heads), 100 * value / values[heads]) for kept, value in values.items()]
            left[told][name] = line
    return left


def figure1() -> Picture:
    """The lines drawn."""
    left = lines()
    half = [f"{line[HEADS // 2 - 1][1]:.0f}{told} in {name}" for told, of in left.items() for name, line in of.items()]
    told = f"Computed at {SIZES}. At half: {', '.join(half)}."
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


def main() -> None:
    """Print the lines as a table."""
    drawn = {f"{told} in {name}": line for told, of in lines().items() for name, line in of.items()}
    rows = [
        {"heads dropped": f"{dropped:g}%", **{name: f"{line[at][1]:.1f}" for name, line in drawn.items()}}
        for at, (dropped, _) in reversed(list(enumerate(next(iter(drawn.values())))))
    ]
    print("command: python -m benchmarks.all_attention_cost")
    print(f"computed for a layer over one segment, {SIZES}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
