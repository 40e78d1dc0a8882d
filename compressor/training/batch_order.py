"""The order in which a training reads its rows; only the seed, the lengths and the sizes determine it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_POOL = 50
"""Batches per pool, in which rows are sorted by length: many save padding, few keep the order random."""


def row_order(lengths: Sequence[int], batch_size: int, batches: int, seed: int) -> list[int]:
    """Row numbers of `batches` consecutive batches of `batch_size`.

    Every epoch visits each row once in a new random order. Within pools of 50 batches, rows are sorted by length so
    that batches need little padding; the batches of a pool are then shuffled.

    Args:
        lengths: tokens of each row.
        batch_size: rows per batch.
        batches: number of batches.
        seed: seed of the random order.

    Returns:
        `batches * batch_size` row numbers.
    """
    rng = np.random.default_rng(seed)
    needed = batches * batch_size
    tokens = np.asarray(lengths)
    epochs = [rng.permutation(len(tokens)) for _ in range(-(-needed // len(tokens)))]
    rows = np.concatenate(epochs)[:needed] if epochs else np.empty(0, dtype=int)
    pool = _POOL * batch_size
    grouped = []
    for start in range(0, needed, pool):
        part = rows[start : start + pool]
        part = part[np.argsort(tokens[part], kind="stable")].reshape(-1, batch_size)
        grouped.append(rng.permutation(part).reshape(-1))
    return [int(row) for part in grouped for row in part]
