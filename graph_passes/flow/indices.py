"""Sets of needed indices along the axes of a tensor, and operations on them."""

from __future__ import annotations

import numpy as np

Index = np.ndarray | None
"""Positions along one axis, `[n]`, ascending, in the axis of the unpruned graph; None: every position."""

Need = tuple[Index, ...]
"""The needed positions of a tensor, one `Index` for each axis."""


def all_indices(rank: int) -> Need:
    """The need of every index of a tensor with `rank` axes."""
    return (None,) * rank


def is_partial(need: Need | None) -> bool:
    """Whether a need leaves out some index of some axis."""
    return need is not None and any(index is not None for index in need)


def union(first: Index, second: Index) -> Index:
    """Positions that are in either index, ascending."""
    return None if first is None or second is None else np.union1d(first, second)


def simplify(index: Index, size: int) -> Index:
    """The index, or None where it covers an axis of `size` positions in order."""
    covers = index is not None and len(index) == size and np.array_equal(index, np.arange(size))
    return None if covers else index


def same_index(first: Index, second: Index) -> bool:
    """Whether two indices hold the same positions in the same order."""
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def part_of_each_row(index: np.ndarray, size: int, rows: int) -> np.ndarray | None:
    """The positions within a row that an index selects, `[n]`, where an axis merges rows with what each row has.

    Returns:
        The positions, or None where rows differ.
    """
    width, rest = divmod(size, rows)
    part = index[: len(index) // rows]
    selected = (np.arange(rows)[:, None] * width + part).reshape(-1)
    return part if not rest and np.array_equal(index, selected) else None


def positions_of(index: Index, size: int) -> np.ndarray:
    """The positions that an index selects from an axis of `size` positions, `[n]`."""
    return np.arange(size) if index is None else index
