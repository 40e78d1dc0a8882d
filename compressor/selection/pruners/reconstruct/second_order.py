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
from scipy.linalg import cho_solve
from threadpoolctl import threadpool_limits

from compressor.selection.pruners.layerwise.gram import Gram, extend, factorize, split
from compressor.selection.pruners.reconstruct.elimination import Elimination


@dataclass(frozen=True)
class Removal:
    """The order in which the units of a group are removed.

    Attributes:
        order: every unit, the first to be removed first.
        damp: the damping used; more than requested if the matrix has no Cholesky factor with that.
    """

    order: tuple[int, ...]
    damp: float

    def kept(self, count: int) -> tuple[int, ...]:
        """Ids of the last `count` units to be removed, ascending.

        Raises:
            ValueError: the group does not have as many units.
        """
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
        step: number of units in a block. Single columns are eliminated in blocks, of which larger ones are faster; the
            order does not depend on it.
        parts: number of consecutive parts of equal size, which lose units in turn: no part loses one while another has
            lost fewer, so that after every `parts` units all have lost equally many.
        damp: share of the mean diagonal that is added to the diagonal.
        metric: positive semidefinite matrix D `[out, out]` that weights output errors: a unit costs
            trace(D W_S (G_SS)^-1 W_S'); None: the identity.

    Raises:
        InputError: the Gram matrix is not finite.
        ValueError: the columns do not divide into these units and parts, the step is not positive, or the Gram matrix
            has other inputs.
    """
    _check_shapes(weight, gram)
    if units < 1 or gram.inputs % units or step < 1 or units % parts:
        raise ValueError(f"{gram.inputs} columns are not {parts} parts of {units} units in all, in steps of {step}")
    weight = np.array(weight, np.float64)
    if metric is not None:
        weight = _root(metric) @ weight
    factor, damp = factorize(gram.matrix, gram.damping, damp)
    elimination = Elimination(weight, gram, factor, gram.inputs // units, parts)
    order: list[int] = []
    # The products with vectors are bound by memory: more threads gain little, and on a busy machine they wait.
    with threadpool_limits(1, user_api="blas"):
        for count in range((units - 1) // step * step, -1, -step):
            order += elimination.remove(units - len(order) - count)
    return Removal(tuple(order), damp)


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
        ValueError: the Gram matrix has other inputs than the weight, or a column of ones without a bias.
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


def _check_shapes(weight: np.ndarray, gram: Gram) -> None:
    if weight.ndim != 2 or weight.shape[1] != gram.inputs:
        raise ValueError(f"the weight is {list(weight.shape)}; the Gram matrix has {gram.inputs} inputs")


def _root(metric: np.ndarray) -> np.ndarray:
    """R with R'R = D, without the directions that D does not see."""
    values, vectors = np.linalg.eigh(metric)
    seen = values > values.max(initial=0.0) * 1e-12
    return (vectors[:, seen] * np.sqrt(values[seen])).T
