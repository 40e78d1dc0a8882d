"""Working arrays of the removal of units by second order; see `removal_order`."""

from __future__ import annotations

import numpy as np
from scipy.linalg import solve_triangular
from scipy.linalg.blas import dgemm
from scipy.linalg.lapack import dpotri

from compressor.selection.pruners.layerwise.gram import Gram

_COMPACT_BELOW = 0.85
"""Share of columns in use below which the working arrays are copied without the others."""


class Elimination:
    """Weight and inverse Gram matrix of the columns that remain, of which units are removed.

    Args:
        weight: weight of the linear, `[out, in]`.
        gram: Gram matrix of its inputs.
        factor: lower Cholesky factor of the damped Gram matrix.
        width: consecutive columns of one unit.
        parts: number of consecutive parts of equal size, which lose units in turn.

    Attributes:
        weight: re-optimised weight of the working columns, `[out, columns]`; zero for removed columns. That of the
            column of ones is the change of the bias.
        inverse: G, the inverse of the damped Gram matrix of the working columns that remain, `[columns, columns]`.
        columns: index of each working column in the original weight; the column of ones is the last.
        remaining: whether each working column belongs to a unit that remains; false for the column of ones.
        part_of: index of the part that each working column belongs to; that of the column of ones follows the last.
        removed: number of units that each part has lost.
    """

    def __init__(self, weight: np.ndarray, gram: Gram, factor: np.ndarray, width: int, parts: int) -> None:
        self.width = width
        self.has_ones = gram.has_ones
        extended = np.column_stack([weight, np.zeros((len(weight), int(gram.has_ones)))])
        self.weight = np.ascontiguousarray(extended)
        self.inverse = _inverse(factor)
        self.columns = np.arange(len(factor))
        self.remaining = self.columns < gram.inputs
        self.part_of = self.columns // (gram.inputs // parts)
        self.removed = np.zeros(parts + int(gram.has_ones), np.intp)
        # The diagonal of an inverse is at least the inverse of the diagonal, which rounding could violate.
        self.floor = 1 / (factor**2).sum(1)

    def remove(self, count: int) -> list[int]:
        """Remove `count` units; return them in the order of their removal."""
        if self.width == 1:
            return self._remove_columns(count)
        return [self._remove_unit() for _ in range(count)]

    def _removable(self) -> np.ndarray:
        """Whether each working column belongs to a unit that may go next: it remains, and no part has lost fewer."""
        parts = len(self.removed) - self.has_ones
        return self.remaining & (self.removed == self.removed[:parts].min())[self.part_of]

    def _remove_unit(self) -> int:
        width = self.width
        starts = np.flatnonzero(self._removable())[::width]
        members = starts[:, None] + np.arange(width)
        blocks = self.inverse[members[:, :, None], members[:, None, :]]
        parts = self.weight[:, members].transpose(1, 2, 0)
        scores = np.trace(np.linalg.solve(blocks, parts @ parts.transpose(0, 2, 1)), axis1=1, axis2=2)
        best = int(scores.argmin())
        chosen = members[best]
        factor = np.linalg.cholesky(blocks[best])
        rows = solve_triangular(factor, self.inverse[chosen], lower=True)
        part = solve_triangular(factor, parts[best], lower=True).T
        unit = int(self.columns[starts[best]]) // width
        self.removed[self.part_of[starts[best]]] += 1
        self._eliminate(chosen, part, rows)
        return unit

    def _remove_columns(self, count: int) -> list[int]:
        """Remove `count` columns one at a time, as a pivoted Cholesky factorisation does; update the matrices once."""
        chosen: list[int] = []
        rows = np.empty((count, len(self.columns)))
        parts = np.empty((len(self.weight), count))
        diagonal = np.maximum(np.diagonal(self.inverse), self.floor)
        norms = np.einsum("oc,oc->c", self.weight, self.weight)
        for index in range(count):
            pivot = int(np.where(self._removable(), norms / diagonal, np.inf).argmin())
            scale = np.sqrt(diagonal[pivot])
            row = (self.inverse[pivot] - rows[:index, pivot] @ rows[:index]) / scale
            part = (self.weight[:, pivot] - parts[:, :index] @ rows[:index, pivot]) / scale
            # Inner products of `part` with the columns of the current weight, which is weight - parts @ rows.
            products = part @ self.weight - (part @ parts[:, :index]) @ rows[:index]
            norms = np.maximum(norms + row * (row * (part @ part) - 2 * products), 0.0)
            diagonal = np.maximum(diagonal - row**2, self.floor)
            self.remaining[pivot] = False
            self.removed[self.part_of[pivot]] += 1
            chosen.append(pivot)
            rows[index], parts[:, index] = row, part
        units: list[int] = self.columns[chosen].tolist()
        self._eliminate(np.array(chosen), parts, rows)
        return units

    def _eliminate(self, chosen: np.ndarray, parts: np.ndarray, rows: np.ndarray) -> None:
        """Subtract `parts @ rows` from the weight and `rows' @ rows` from the inverse."""
        self.remaining[chosen] = False
        _subtract_product(self.weight, parts, rows)
        _subtract_product(self.inverse, rows.T, rows)
        self.weight[:, chosen] = 0
        used = self.remaining.copy()
        used[len(used) - self.has_ones :] = True
        if used.mean() < _COMPACT_BELOW:
            self.weight = np.ascontiguousarray(self.weight[:, used])
            self.inverse = np.ascontiguousarray(self.inverse[np.ix_(used, used)])
            self.columns, self.remaining, self.floor = self.columns[used], self.remaining[used], self.floor[used]
            self.part_of = self.part_of[used]


def _inverse(factor: np.ndarray) -> np.ndarray:
    """Inverse of L L', C-contiguous, for a lower Cholesky factor L."""
    inverse, info = dpotri(factor.T, lower=False)
    if info:
        raise np.linalg.LinAlgError(f"dpotri returned {info}")
    # The other triangle holds the zeros of the factor.
    full = np.ascontiguousarray(inverse + inverse.T)
    full[np.diag_indices_from(full)] /= 2
    return full


def _subtract_product(target: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """`target -= left @ right` in place, for a C-contiguous target."""
    result = dgemm(-1.0, right.T, left.T, 1.0, target.T, overwrite_c=True)
    assert np.shares_memory(result, target)
