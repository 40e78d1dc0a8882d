"""Removal of units by second order, with the weights of those that remain reconstructed by least squares.

A group of units ends in a linear y = W x + b. With inputs X `[tokens, inputs]` and H = X'X, removing the columns S of W
costs rho_S = trace(W_S (G_SS)^-1 W_S') in squared output error, G = H^-1, when the other columns are re-optimised to
W - W_S (G_SS)^-1 G_S: (Hassibi, Stork 1993, "Second order derivatives for network pruning: Optimal Brain Surgeon",
equation 5). Units are whole sets of columns, as in ZipLM (Kurtic et al. 2023) and OSSCAR (Meng et al. 2024): one column
for a neuron, `head_dim` columns for a head. One run to zero units gives the choice for every width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from compressor.selection.pruners.layerwise.refit import Gram, damped
from compressor.units.prunable import LinearWeights

_COMPACT_BELOW = 0.85
"""Share of columns in use below which the working arrays are copied without the others."""
_ROWS = 128
"""Rows of a product that are computed at once."""


@dataclass(frozen=True)
class Removal:
    """The order in which the units of a group are removed.

    Attributes:
        order: every unit, the first to be removed first.
        damp: the damping used; more than requested if the matrix is not positive definite with that.
    """

    order: tuple[int, ...]
    damp: float

    def kept(self, count: int) -> tuple[int, ...]:
        """Ids of the last `count` units to be removed, ascending."""
        return tuple(sorted(self.order[len(self.order) - count :]))


def removal_order(
    weight: np.ndarray,
    gram: Gram,
    units: int,
    *,
    together: int = 1,
    parts: int = 1,
    damp: float = 0.01,
    metric: np.ndarray | None = None,
) -> Removal:
    """Remove the units of a group one at a time, always the one that costs least after the others are re-optimised.

    The column of ones is never removed, so the mean of a removed unit moves into the bias.

    Args:
        weight: weight of the linear that reads the units, `[out, in]`; a unit is `in / units` consecutive columns.
        together: number of units that are eliminated at a time: more are faster where a unit is a single column.
        parts: number of consecutive parts of equal size: no part loses a unit while another has lost fewer.
        metric: positive semidefinite matrix D `[out, out]` that weights output errors: a unit costs
            trace(D W_S (G_SS)^-1 W_S'); None: the identity.

    Raises:
        InputError: the Gram matrix is not finite.
    """
    weight = np.array(weight, np.float64)
    if metric is not None:  # R with R'R = D, without the directions that D does not see
        values, vectors = np.linalg.eigh(metric)
        seen = values > values.max(initial=0.0) * 1e-12
        weight = (vectors[:, seen] * np.sqrt(values[seen])).T @ weight
    matrix, damp = damped(gram.matrix, gram.damping, damp)
    elimination = _Elimination(weight, gram, matrix, gram.inputs // units, parts)
    order: list[int] = []
    # The products with vectors are bound by memory: more threads gain little, and on a busy machine they wait.
    with threadpool_limits(1, user_api="blas"):
        for count in range((units - 1) // together * together, -1, -together):
            order += elimination.remove(units - len(order) - count)
    return Removal(tuple(order), damp)


def reconstruct(dense: LinearWeights, gram: Gram, columns: np.ndarray, *, damp: float = 0.01) -> LinearWeights:
    """The weights of some columns that reproduce the linear's outputs best, W_K + W_R H_RK (H_KK)^-1.

    It equals the result of removing the columns R one at a time as in `removal_order`.

    Args:
        dense: weights of the linear, with a bias exactly if the Gram matrix has a column of ones.

    Raises:
        InputError: the Gram matrix is not finite.
    """
    extended, kept = dense.extended, gram.with_ones(columns)
    removed = np.setdiff1d(np.arange(len(gram.matrix)), kept)
    matrix, damp = damped(gram.matrix[np.ix_(kept, kept)], gram.damping[kept], damp)
    reconstructed = np.zeros_like(extended)
    change = np.linalg.solve(matrix, gram.matrix[np.ix_(kept, removed)] @ extended[:, removed].T)
    reconstructed[:, kept] = extended[:, kept] + change.T
    return LinearWeights.of(reconstructed, damp, has_ones=gram.has_ones)


class _Elimination:
    """Weight and inverse Gram matrix of the columns that remain, from which units are removed.

    Attributes:
        weight: re-optimised weight of the working columns, `[out, columns]`; zero for removed columns. That of the
            column of ones is the change of the bias.
        inverse: G, the inverse of the damped Gram matrix of the working columns that remain, `[columns, columns]`.
        columns: index of each working column in the original weight; the column of ones is the last.
        remaining: whether each working column belongs to a unit that remains; false for the column of ones.
        part_of: index of the part that each working column belongs to; that of the column of ones follows the last.
        removed: number of units that each part has lost.
    """

    def __init__(self, weight: np.ndarray, gram: Gram, matrix: np.ndarray, width: int, parts: int) -> None:
        self.width = width
        self.has_ones = gram.has_ones
        extended = np.column_stack([weight, np.zeros((len(weight), int(gram.has_ones)))])
        self.weight = np.ascontiguousarray(extended)
        inverse = np.linalg.inv(matrix)
        self.inverse = (inverse + inverse.T) / 2
        self.columns = np.arange(len(matrix))
        self.remaining = self.columns < gram.inputs
        self.part_of = self.columns // (gram.inputs // parts)
        self.removed = np.zeros(parts + int(gram.has_ones), np.intp)
        # The diagonal of an inverse is at least the inverse of the diagonal, which rounding could violate.
        self.floor = 1 / np.diagonal(matrix)

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
        rows = np.linalg.solve(factor, self.inverse[chosen])
        part = np.linalg.solve(factor, parts[best]).T
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


def _subtract_product(target: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """`target -= left @ right`, some rows at a time, which stay in the cache."""
    for start in range(0, len(target), _ROWS):
        target[start : start + _ROWS] -= left[start : start + _ROWS] @ right
