"""Buckets of a block mask: rows that keep similar numbers of key blocks and are computed together.

Heads that keep every block are in no bucket: they are computed together as one dense product. The rows of a bucket are
padded to its widest row. Buckets are chosen to minimize the total cost of padding and of additional nodes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from graph_passes.block_sparse.masks import BlockMask

_NODES = 16
"""Number of nodes of one bucket."""
_NODE_COST = 400_000
"""Overhead of a node, in multiply-accumulates."""
_BUCKET_SCORES = 128 * 4096
"""Largest number of scores that a bucket computes for one example, so that its tensors fit the caches."""


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Rows that are computed together.

    Attributes:
        heads, rows: head and query block of each row, `[row]`; query blocks ascend.
        columns: key blocks of each row, `[row, width]`; -1 pads.
        diagonal: whether the last column is the row's own block, in which causality hides a triangle.
    """

    heads: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    diagonal: bool

    @property
    def width(self) -> int:
        """Number of key blocks of the widest row."""
        return int(self.columns.shape[1])


def buckets(mask: BlockMask, head_dim: int, *, causal: bool = False, every: bool = False) -> list[Bucket]:
    """Sort the rows of a mask that keep any block into the buckets of least cost, without rows of whole heads.

    Args:
        head_dim: width of a head, for the cost of a row.
        causal: whether keys after the query are hidden.
        every: whether rows that keep no block are computed as well.
    """
    kept = visible_blocks(mask, causal=causal)
    widths = np.maximum(kept.sum(2), int(every))
    widths[dense_heads(mask, causal=causal)] = 0
    keeps_diagonal = np.zeros_like(widths, bool)
    if causal:
        size = min(kept.shape[1:])
        keeps_diagonal[:, :size] = kept[:, np.arange(size), np.arange(size)]
    result = []
    for diagonal in (False, True):
        chosen = (widths > 0) & (keeps_diagonal == diagonal)
        for low, high in _ranges(widths[chosen], mask.block, head_dim):
            heads, rows = np.nonzero(chosen & (widths >= low) & (widths <= high))
            maximum = max(1, _BUCKET_SCORES // (high * mask.block**2))
            for part in np.array_split(np.arange(len(heads)), -(-len(heads) // maximum)):
                order = part[np.argsort(rows[part], kind="stable")]
                result.append(_bucket(kept, heads[order], rows[order], high, diagonal=diagonal))
    return result


def visible_blocks(mask: BlockMask, *, causal: bool) -> np.ndarray:
    """The kept blocks that causality does not hide entirely, bool `[head, query block, key block]`."""
    return mask.kept & np.tri(*mask.kept.shape[1:], dtype=np.bool_) if causal else mask.kept


def dense_heads(mask: BlockMask, *, causal: bool) -> np.ndarray:
    """Bool `[head]`: the heads that keep every block that causality does not hide."""
    every_block = visible_blocks(BlockMask(np.ones_like(mask.kept), mask.block, mask.memory), causal=causal)
    heads: np.ndarray = (visible_blocks(mask, causal=causal) == every_block).all(axis=(1, 2))
    return heads


def _ranges(widths: np.ndarray, block: int, head_dim: int) -> list[tuple[int, int]]:
    """Divide the widths into the ranges of least cost. The cost of a range is that of its padded rows and of its nodes.

    This is dynamic programming over the distinct widths: `best[end]` holds cost and ranges of the first `end` widths.
    """
    values, counts = np.unique(widths, return_counts=True)
    block_cost = 2 * block * block * head_dim
    best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])]
    for end in range(1, len(values) + 1):
        options = []
        for start in range(end):
            cost = float(counts[start:end].sum() * values[end - 1] * block_cost + _NODES * _NODE_COST)
            options.append((best[start][0] + cost, [*best[start][1], (int(values[start]), int(values[end - 1]))]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def _bucket(kept: np.ndarray, heads: np.ndarray, rows: np.ndarray, width: int, *, diagonal: bool) -> Bucket:
    """One bucket; the key blocks of diagonal rows are aligned to the right, of other rows to the left."""
    columns = np.full((len(rows), width), -1)
    for index, (head, row) in enumerate(zip(heads, rows, strict=True)):
        active = np.flatnonzero(kept[head, row])
        if diagonal:
            columns[index, width - len(active) :] = active
        else:
            columns[index, : len(active)] = active
    return Bucket(heads, rows, columns, diagonal)
