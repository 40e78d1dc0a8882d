"""Removal of units by second order, with the weights of those that remain reconstructed by least squares.

A group of units ends in a linear y = W x + b. With inputs X `[tokens, inputs]` and H = X'X, removing the columns S of W
costs rho_S = trace(W_S (G_SS)^-1 W_S') in squared output error, G = H^-1, when the other columns are re-optimised to
W - W_S (G_SS)^-1 G_S: (Hassibi, Stork 1993, "Second order derivatives for network pruning: Optimal Brain Surgeon",
equation 5). Units are whole sets of columns, as in ZipLM (Kurtic et al. 2023) and OSSCAR (Meng et al. 2024): one column
for a neuron, `head_dim` columns for a head. One run to zero units gives the choice for every width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.linalg.blas import dgemm
from scipy.linalg.lapack import dpotri
from threadpoolctl import threadpool_limits

from compressor.errors import ErrorCode, InputError

_log = logging.getLogger(__name__)

_LEAST_DAMP = 1e-8
"""The damping that follows zero when a factorisation fails."""
_MOST_DAMP = 1e4
"""A matrix that has no factor at this damping is refused."""
_COMPACT_BELOW = 0.85
"""Share of columns in use below which the working arrays are copied without the others."""


@dataclass(frozen=True, eq=False)
class Gram:
    """Weighted sum of outer products of the inputs of a linear.

    Attributes:
        matrix: `[inputs, inputs]`, or `[inputs + 1, inputs + 1]` with `has_ones`, float64.
        has_ones: whether the last row and column belong to an input that is always one, whose weight is the bias.
        weight: sum of the token weights.
    """

    matrix: np.ndarray
    has_ones: bool
    weight: float

    @property
    def inputs(self) -> int:
        """Number of inputs of the linear, without the column of ones."""
        return len(self.matrix) - self.has_ones

    @property
    def damping(self) -> np.ndarray:
        """What a damping of one adds to the diagonal: the mean diagonal of the inputs; nothing for the ones."""
        diagonal = np.diagonal(self.matrix)[: self.inputs]
        scale = (diagonal.mean() if len(diagonal) else 0.0) or 1.0
        return np.append(np.full(self.inputs, scale), np.zeros(int(self.has_ones)))

    def damped(self, damp: float) -> np.ndarray:
        """The matrix with `damp` times the mean diagonal added to the diagonal, except to that of the ones."""
        return _damped(self.matrix, self.damping, damp)

    def with_ones(self, columns: np.ndarray) -> np.ndarray:
        """Indices of input columns, followed by that of the ones if there are any."""
        return np.append(columns, [self.inputs] * self.has_ones).astype(np.intp)

    def select(self, columns: np.ndarray) -> Gram:
        """The Gram matrix of some input columns, and of the ones if there are any."""
        kept = self.with_ones(columns)
        return Gram(self.matrix[np.ix_(kept, kept)], self.has_ones, self.weight)


@dataclass(frozen=True)
class Removal:
    """The order in which the units of a group are removed, and the error after each step.

    Attributes:
        order: every unit, the first to be removed first.
        errors: kept count -> ||X(W' - W)'|| / ||XW'||, where W' is reconstructed for the kept units; for the multiples
            of the step, for zero and for all units.
        damp: the damping used; more than requested if the matrix has no Cholesky factor with that.
    """

    order: tuple[int, ...]
    errors: Mapping[int, float]
    damp: float

    def kept(self, count: int) -> tuple[int, ...]:
        """Ids of the last `count` units to be removed, ascending."""
        if not 0 <= count <= len(self.order):
            raise ValueError(f"count is {count}; the group has {len(self.order)} units")
        return tuple(sorted(self.order[len(self.order) - count :]))


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """Weights of a linear that reads a part of its inputs.

    Attributes:
        weight: `[out, in]`, float64; zero in the columns that are not kept.
        bias: `[out]`, float64; None for a linear without bias.
        damp: the damping used; more than requested if the matrix has no Cholesky factor with that.
    """

    weight: np.ndarray
    bias: np.ndarray | None
    damp: float


def unit_columns(units: Iterable[int], width: int) -> np.ndarray:
    """Indices of the columns of units that have `width` consecutive columns each."""
    starts = np.fromiter(units, np.intp) * width
    return (starts[:, None] + np.arange(width)).reshape(-1)


def removal_order(
    weight: np.ndarray,
    gram: Gram,
    units: int,
    *,
    step: int = 1,
    parts: int = 1,
    damp: float = 0.01,
    metric: np.ndarray | None = None,
) -> Removal:
    """Remove the units of a group one at a time, always the one that costs least after the others are re-optimised.

    The column of ones is never removed, so the mean of a removed unit moves into the bias.

    Args:
        weight: weight of the linear that reads the units, `[out, in]`; a unit is `in / units` consecutive columns.
        gram: Gram matrix of the inputs of the linear.
        units: number of units.
        step: interval between the kept counts whose errors are computed. The order does not depend on it. Single
            columns are eliminated in blocks of this size, so larger steps are faster.
        parts: number of consecutive parts of equal size, which lose units in turn: no part loses one while another has
            lost fewer, so that after every `parts` units all have lost equally many.
        damp: share of the mean diagonal that is added to the diagonal.
        metric: positive semidefinite matrix D `[out, out]` that weights output errors: a unit costs
            trace(D W_S (G_SS)^-1 W_S'), and the errors are in this metric too; None: the identity.

    Raises:
        InputError: the Gram matrix is not finite.
    """
    _check_shapes(weight, gram)
    if units < 1 or gram.inputs % units or step < 1 or units % parts:
        raise ValueError(f"{gram.inputs} columns are not {parts} parts of {units} units in all, in steps of {step}")
    weight = np.array(weight, np.float64)
    if metric is not None:
        weight = _root(metric) @ weight
    factor, damp = factorize(gram.matrix, gram.damping, damp)
    elimination = _Elimination(weight, gram, factor, gram.inputs // units, parts)
    total = np.vdot(weight, weight @ gram.matrix[: gram.inputs, : gram.inputs])
    penalty = damp * gram.damping[0]

    errors = {units: 0.0}
    order: list[int] = []
    damped_error = 0.0
    # The products with vectors are bound by memory: more threads gain little, and on a busy machine they wait.
    with threadpool_limits(1, user_api="blas"):
        for count in range((units - 1) // step * step, -1, -step):
            chosen, cost = elimination.remove(units - len(order) - count)
            order += chosen
            damped_error += cost
            # The costs add up to the error under the damped matrix.
            error = max(damped_error - penalty * elimination.squared_change(), 0.0)
            errors[count] = float(np.sqrt(error / total)) if total > 0 else 0.0
    return Removal(tuple(order), dict(sorted(errors.items())), damp)


def reconstruct(
    weight: np.ndarray,
    bias: np.ndarray | None,
    gram: Gram,
    columns: np.ndarray,
    *,
    damp: float = 0.01,
) -> Reconstruction:
    """The weights of some columns that reproduce the linear's outputs best, W_K + W_R H_RK (H_KK)^-1.

    It equals the result of removing the columns R one at a time as in `removal_order`.

    Args:
        weight: weight of the linear, `[out, in]`.
        bias: its bias `[out]`; None exactly if the Gram matrix has no column of ones.
        gram: Gram matrix of the inputs of the linear.
        columns: indices of the columns K that are kept.
        damp: share of the mean diagonal that is added to the diagonal.

    Raises:
        InputError: the Gram matrix is not finite.
    """
    _check_shapes(weight, gram)
    extended = extend(weight, bias, gram.has_ones)
    kept = gram.with_ones(columns)
    removed = np.setdiff1d(np.arange(len(gram.matrix)), kept)
    factor, damp = factorize(gram.matrix[np.ix_(kept, kept)], gram.damping[kept], damp)
    reconstructed = np.zeros_like(extended)
    change = cho_solve((factor, True), gram.matrix[np.ix_(kept, removed)] @ extended[:, removed].T)
    reconstructed[:, kept] = extended[:, kept] + change.T
    return Reconstruction(*split(reconstructed, gram.has_ones), damp)


def extend(weight: np.ndarray, bias: np.ndarray | None, has_ones: bool) -> np.ndarray:
    """The weight with the bias as its last column, float64; without a column of ones there must be no bias."""
    if (bias is not None) != has_ones:
        raise ValueError("a linear has a bias exactly if its Gram matrix has a column of ones")
    columns = weight if bias is None else np.column_stack([weight, bias])
    return np.array(columns, np.float64)


def split(extended: np.ndarray, has_ones: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """The weight and the bias of which `extend` is the inverse."""
    return (extended[:, :-1].copy(), extended[:, -1].copy()) if has_ones else (extended, None)


def factorize(matrix: np.ndarray, damping: np.ndarray, damp: float) -> tuple[np.ndarray, float]:
    """Lower Cholesky factor of `matrix + damp * diag(damping)`, and the damping used.

    The damping is raised tenfold until the factor exists.

    Raises:
        InputError: the matrix is not finite, or has no factor with any damping.
    """
    if not np.isfinite(matrix).all():
        raise InputError(
            "the sums over the calibration rows are NaN or infinite; check the weights of the model and the rows",
            code=ErrorCode.NOT_FINITE,
        )
    while True:
        try:
            return np.linalg.cholesky(_damped(matrix, damping, damp)), damp
        except np.linalg.LinAlgError as error:
            if damp >= _MOST_DAMP:
                raise InputError(
                    "the sums over the calibration rows are no Gram matrix, or every token has weight zero; use more"
                    " rows, or rows of the kind that the model serves",
                    code=ErrorCode.INVALID_ROWS,
                ) from error
            raised = max(10 * damp, _LEAST_DAMP)
            _log.info("no Cholesky factor with damping %g; continuing with %g", damp, raised)
            damp = raised


class _Elimination:
    """Weight and inverse Gram matrix of the columns that remain, of which units are removed.

    Attributes:
        original: weight of the working columns before any removal, `[out, columns]`; zero for the column of ones.
        weight: their re-optimised weight, `[out, columns]`; zero for removed columns.
        inverse: G, the inverse of the damped Gram matrix of the working columns that remain, `[columns, columns]`.
        columns: index of each working column in the original weight; the column of ones is the last.
        remaining: whether each working column belongs to a unit that remains; false for the column of ones.
        part_of: index of the part that each working column belongs to; that of the column of ones follows the last.
        removed: number of units that each part has lost.
    """

    def __init__(self, weight: np.ndarray, gram: Gram, factor: np.ndarray, width: int, parts: int) -> None:
        self.width = width
        self.has_ones = gram.has_ones
        self.original = np.column_stack([weight, np.zeros((len(weight), int(gram.has_ones)))])
        self.squared_norm = np.vdot(weight, weight)
        self.weight = self.original.copy()
        self.inverse = _inverse(factor)
        self.columns = np.arange(len(factor))
        self.remaining = self.columns < gram.inputs
        self.part_of = self.columns // (gram.inputs // parts)
        self.removed = np.zeros(parts + int(gram.has_ones), np.intp)
        # The diagonal of an inverse is at least the inverse of the diagonal, which rounding could violate.
        self.floor = 1 / (factor**2).sum(1)

    def remove(self, count: int) -> tuple[list[int], float]:
        """Remove `count` units, and return them in their order with the sum of what they cost."""
        if self.width == 1:
            return self._remove_columns(count)
        chosen, total = [], 0.0
        for _ in range(count):
            unit, cost = self._remove_unit()
            chosen.append(unit)
            total += cost
        return chosen, total

    def squared_change(self) -> float:
        """||W' - W||^2 over the original columns, without the change of the bias."""
        bias_change = self.weight[:, len(self.columns) - self.has_ones :]
        squared = np.vdot(self.weight, self.weight) - np.vdot(bias_change, bias_change)
        return float(squared - 2 * np.vdot(self.weight, self.original) + self.squared_norm)

    def _removable(self) -> np.ndarray:
        """Whether each working column belongs to a unit that may go next: it remains, and no part has lost fewer."""
        parts = len(self.removed) - self.has_ones
        return self.remaining & (self.removed == self.removed[:parts].min())[self.part_of]

    def _remove_unit(self) -> tuple[int, float]:
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
        return unit, float(np.vdot(part, part))

    def _remove_columns(self, count: int) -> tuple[list[int], float]:
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
        units = self.columns[chosen].tolist()
        self._eliminate(np.array(chosen), parts, rows)
        return units, float(np.vdot(parts, parts))

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
            self.original = np.ascontiguousarray(self.original[:, used])
            self.inverse = np.ascontiguousarray(self.inverse[np.ix_(used, used)])
            self.columns, self.remaining, self.floor = self.columns[used], self.remaining[used], self.floor[used]
            self.part_of = self.part_of[used]


def _check_shapes(weight: np.ndarray, gram: Gram) -> None:
    if weight.ndim != 2 or weight.shape[1] != gram.inputs:
        raise ValueError(f"the weight is {list(weight.shape)}; the Gram matrix has {gram.inputs} inputs")


def _damped(matrix: np.ndarray, damping: np.ndarray, damp: float) -> np.ndarray:
    result = matrix.copy()
    result[np.diag_indices_from(result)] += damp * damping
    return result


def _root(metric: np.ndarray) -> np.ndarray:
    """R with R'R = D, without the directions that D does not see."""
    values, vectors = np.linalg.eigh(metric)
    seen = values > values.max(initial=0.0) * 1e-12
    return (vectors[:, seen] * np.sqrt(values[seen])).T


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
