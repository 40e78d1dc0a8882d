"""Sizes, schedules and ablations of `benchmarks.all_attention`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

LEVELS = {"word": "perplexity", "character": "bits-per-character"}
ABLATIONS: dict[str, dict[str, Any]] = {
    "- penalty warm-up": {"penalty_warmup": 0.0},
    "- initial value 2": {"initial": 0.0},
    "- output scaling": {"output_scaling": False},
    "- all three": {"penalty_warmup": 0.0, "initial": 0.0, "output_scaling": False},
}
"""Omitted technique of table 3 -> options of bin-concrete."""

PACE = {
    "weight_decay": 0.0,
    "max_grad_norm": 0.25,
    "optimizer": "lamb",
    "scheduler": "cosine",
    "final_learning_rate": 1e-4,
    "evaluations": 4,
    "points": 60,
}
"""Schedule of every cell, with gates and without (section 4.1.2); `pace` adds the warm-up."""
PEAK, AGAIN = 1e-2, 1e-3
"""Peak learning rates: from scratch, and from the dense model."""


def pace(steps: int, precision: str) -> dict[str, Any]:
    """The schedule of a phase, with a warm-up of 4K steps (section 4.1.2), or of a twentieth of all steps if less.

    4K steps are 0.025 of the paper's 160K steps of dense training, and 0.05 of its 80K steps of pruning.
    """
    return {**PACE, "mixed_precision": precision, "warmup": min(0.05, 4_000 / steps)}


@dataclass(frozen=True)
class Size:
    """Models and schedules of one `--size`.

    Attributes:
        hidden: width of the All-attention model; the feed-forward layer of a Transformer-XL is 4 times as wide.
        layers: layers.
        heads: heads per layer.
        persistent: persistent vectors per head.
        segment: tokens of a segment and of the memory.
        batch: number of parallel streams.
        vocabulary: maximum number of words; None: all.
        tokens: maximum number of training tokens; None: all.
        held: maximum number of tokens of each half of the validation text; None: all.
        steps: training steps of the dense model.
        pruning: further training steps, with gates or without.
        penalties: values of lambda; the ablation has the largest.
        widths: widths of the narrower Transformer-XLs.
        seeds: seeds of the cells.
        gate_rate: learning rate of the gates.
        dropout: dropout rate of every kind; None: the paper's rates. `small` has 0, since it reads each token at most
            twice.
        precision: precision of matrix products.
    """

    hidden: int
    layers: int
    heads: int
    persistent: int
    segment: int
    batch: int
    vocabulary: int | None
    tokens: int | None
    held: int | None
    steps: int
    pruning: int
    penalties: tuple[float, ...]
    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    gate_rate: float = 0.1
    dropout: float | None = None
    precision: str = "bf16"


_TINY = Size(32, 2, 4, 128, 16, 8, 500, 20_000, 2_000, 40, 80, (0.1,), (24,), (1,), gate_rate=0.3)
_SMALL = Size(
    128,
    4,
    8,
    512,
    64,
    8,
    4_000,
    None,
    25_000,
    500,
    250,
    (0.003, 0.006, 0.012),
    (112, 96, 80),
    (1, 2, 3),
    gate_rate=0.3,
    dropout=0.0,
)
_PAPER = Size(
    512, 16, 8, 2048, 192, 96, None, None, None, 160_000, 80_000, (0.01, 0.015, 0.02), (480, 448, 416), (1, 2, 3)
)
SIZES: dict[str, dict[str, Size]] = {
    "tiny": {"word": _TINY, "character": _TINY},
    "small": {"word": _SMALL, "character": _SMALL},
    "paper": {"word": _PAPER, "character": replace(_PAPER, layers=12, segment=512, batch=64)},
}
