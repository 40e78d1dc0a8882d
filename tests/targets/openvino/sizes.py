"""Fixed shapes, sizes of batches, and batches of these sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compressor.targets.base import Shape
from tests.zoo import text

SHAPES: tuple[Shape, ...] = ((1, 8), (4, 16), (1, 24))
TEXT = {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}

SIZES: dict[Shape, Shape | None] = {
    (1, 8): (1, 8),
    (4, 16): (4, 16),
    (1, 7): (1, 8),
    (1, 5): None,
    (1, 9): None,
    (1, 20): (1, 24),
    (2, 3): None,
    (4, 13): (4, 16),
    (3, 16): None,
    (2, 17): None,
    (5, 4): None,
    (1, 25): None,
    (2, 40): None,
}
"""Batch size and length -> the smallest of `SHAPES` that holds them and of which they fill 80%."""


def feeds_of(batch: int, seq: int, axes: Sequence[str] = tuple(TEXT)) -> dict[str, np.ndarray]:
    """Random rows of text, the last one padded."""
    tensors = text(batch, seq, seed=batch + seq)
    return {name: tensors[name].numpy() for name in axes}
