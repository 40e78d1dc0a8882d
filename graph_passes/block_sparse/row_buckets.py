"""Buckets of a block mask: rows that keep about as many key blocks, computed together.

Heads that keep every block are in none: they stay dense, all of them one product. A bucket's rows are as wide as its
widest; the buckets are chosen so that padding and the cost of more nodes come to the least together.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from graph_passes.block_sparse.masks import BlockMask

_NODES = 16
"""Nodes of one bucket."""
_NODE_COST = 400_000
"""What a node costs beside its arithmetic, in multiply-accumulates."""
_BUCKET_BLOCKS = 128 * 4096
"""Most scores that a bucket computes for one row of the batch, so that its tensors stay in the caches."""


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Rows that are computed together.

    Attributes:
        heads, rows: head and query block of each row `[row]`; query blocks ascend.
        columns: key blocks of each row `[row, width]`; -1 fills up.
        diagonal: whether the last column is the row's own block, of which causality hides a triangle.
    """

    heads: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    diagonal: bool

    @property
    def width(self) -> int:
        return int(self.columns.shape[1])


def buckets(mask: BlockMask, head_dim: int, *, causal: bool = False, every: bool = False) -> list[Bucket]:
    """The rows of a mask that keep any block (or every row) of heads that are not whole, in the buckets that cost
    least."""
    kept = computed(mask, causal=causal)
    widths = np.maximum(kept.sum(2), int(every))
    widths[whole(mask, causal=causal)] = 0
    own = np.zeros_like(widths, bool)
    if causal:
        size = min(kept.shape[1:])
        own[:, :size] = kept[:, np.arange(size), np.arange(size)]
    found = []
    for diagonal in (False, True):
        chosen = (widths > 0) & (own == diagonal)
        for low, high in _ranges(widths[chosen], mask.block, head_dim):
            heads, rows = np.nonzero(chosen & (widths >= low) & (widths <= high))
            most = max(1, _BUCKET_BLOCKS // (high * mask.block**2))
            for part in np.array_split(np.arange(len(heads)), -(-len(heads) // most)):
                order = part[np.argsort(rows[part], kind="stable")]
                found.append(_bucket(kept, heads[order], rows[order], high, diagonal=diagonal))
    return found


def computed(mask: BlockMask, *, causal: bool) -> np.ndarray:
    """The blocks kept that causality does not hide whole."""
    return mask.kept & np.tri(*mask.kept.shape[1:], dtype=np.bool_) if causal else mask.kept


def whole(mask: BlockMask, *, causal: bool) -> np.ndarray:
    """Bool `[head]`: heads that keep every block that causality leaves them."""
    full = computed(BlockMask(np.ones_like(mask.kept), mask.block, mask.memory), causal=causal)
    found: np.ndarray = (computed(mask, causal=causal) == full).all(axis=(1, 2))
    return found


def _ranges(widths: np.ndarray, block: int, head_dim: int) -> list[tuple[int, int]]:
    """Cut the widths into ranges so that the padding of each to its highest and the nodes of each cost least."""
    values, counts = np.unique(widths, return_counts=True)
    each = 2 * block * block * head_dim
    best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])]
    for end in range(1, len(values) + 1):
        options = []
        for start in range(end):
            cost = float(counts[start:end].sum() * values[end - 1] * each + _NODES * _NODE_COST)
            options.append((best[start][0] + cost, [*best[start][1], (int(values[start]), int(values[end - 1]))]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def _bucket(kept: np.ndarray, heads: np.ndarray, rows: np.ndarray, width: int, *, diagonal: bool) -> Bucket:
    columns = np.full((len(rows), width), -1)
    for place, (head, row) in enumerate(zip(heads, rows, strict=True)):
        active = np.flatnonzero(kept[head, row])
        if diagonal:
            columns[place, width - len(active) :] = active
        else:
            columns[place, : len(active)] = active
    return Bucket(heads, rows, columns, diagonal)
