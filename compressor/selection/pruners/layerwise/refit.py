"""Refitting of a linear to the outputs of the original model, from sums over tokens.

With inputs A of the model as pruned so far, the weights of a linear are the ridge regression to its targets T that
stays close to the weights W_0 of the second-order step: argmin ||A W' + b - T||^2 + lambda ||W - W_0||^2. Where T is
the original model's output and residual less the residual of the pruned model, a refit repairs the error of all earlier
ones, as the layer-wise reconstruction of K-prune does (Park et al. 2024, "Accurate retraining-free pruning").
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_solve

from compressor.errors import ErrorCode, InputError
from compressor.selection.pruners.layerwise.gram import Gram, extend, factorize, split


@dataclass(frozen=True, eq=False)
class Refit:
    """Weights of a linear that was refitted on a part of its inputs.

    Attributes:
        weight: `[out, in]`, float64; zero in the columns that are not kept.
        bias: `[out]`, float64; None for a linear without bias.
        ridge: the ridge used; more than requested if the matrix has no Cholesky factor with that.
    """

    weight: np.ndarray
    bias: np.ndarray | None
    ridge: float


Array = Any
"""An array of NumPy, or a tensor of PyTorch on any device."""


class RefitSums:
    """Sums over tokens for the selection of inputs of a linear and for its refit.

    Tokens are arrays of NumPy or tensors of PyTorch. Products are computed on the device of the activations, in float64
    for float64 activations and else in float32; the sums are float64 on the device of the first ones.

    Args:
        inputs: number of inputs of the linear.
        outputs: number of its outputs; None: there are no targets and only `gram` is needed.
        has_ones: whether the linear has a bias, which is the weight of an input that is always one.
        name: name of the linear in error messages.
    """

    def __init__(self, inputs: int, outputs: int | None = None, *, has_ones: bool, name: str = "a linear") -> None:
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.has_ones = has_ones
        self._sums: tuple[Array, Array] | None = None

    @property
    def gram(self) -> Gram:
        """The Gram matrix of the inputs so far."""
        size = self.inputs + self.has_ones
        return Gram(np.zeros((size, size)) if self._sums is None else _numpy(self._sums[0]), self.has_ones)

    @property
    def cross(self) -> np.ndarray:
        """Sum of the products of inputs, and of the ones if there are any, with targets: `[inputs, outputs]`."""
        if self._sums is None:
            return np.zeros((self.inputs + self.has_ones, self.outputs or 0))
        return _numpy(self._sums[1])

    def add(self, inputs: Array, targets: Array | None = None, weights: Array | None = None) -> None:
        """Add tokens.

        Args:
            inputs: inputs of the linear, `[..., inputs]`, without gradients.
            targets: the outputs to reproduce, bias included, `[..., outputs]`; None exactly if there are no outputs.
            weights: weight of each token, `[...]`, zero or more; tokens of weight zero, such as padding, may hold
                anything. None: all tokens have the weight one.

        Raises:
            InputError: an input, target or weight, or a sum of their products, is NaN or infinite.
        """
        xp = sys.modules[type(inputs).__module__.partition(".")[0]]  # the functions below have one signature in both
        kind = {"dtype": xp.promote_types(inputs.dtype, xp.float32), "device": inputs.device}
        columns = [xp.asarray(inputs, **kind)]
        if self.has_ones:
            columns.append(xp.ones((*inputs.shape[:-1], 1), **kind))
        if targets is not None:
            columns.append(xp.asarray(targets, **kind))
        rows = xp.concatenate(columns, -1)
        rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
        if weights is not None:
            scales = xp.asarray(weights, **kind).reshape(-1)
            self._check_finite(scales, "weights")
            rows, scales = rows[scales > 0], scales[scales > 0]
            scaled = rows * xp.sqrt(scales)[:, None]
        else:
            scaled = rows
        size = self.inputs + self.has_ones
        products = scaled[:, :size].T @ scaled
        if not xp.isfinite(products).all():  # so they are wherever an activation is not, and are fewer
            self._check_finite(rows, "activations")
            self._check_finite(products, "sums of products of activations")
        gram, cross = (xp.asarray(part, dtype=xp.float64) for part in (products[:, :size], products[:, size:]))
        gram = (gram + gram.T) / 2
        if self._sums is None:
            self._sums = gram, cross
        else:
            for total, part in zip(self._sums, (gram, cross), strict=True):
                total += xp.asarray(part, device=total.device)

    def solve(self, start: np.ndarray, start_bias: np.ndarray | None, columns: np.ndarray, *, ridge: float) -> Refit:
        """The weights of some columns that fit the targets, near those of `start`.

        Args:
            start: the weight W_0 before the refit, `[out, in]`.
            start_bias: its bias `[out]`, which only says that there is one: the refitted bias is not held near it. None
                exactly if there is no column of ones.
            columns: indices of the columns that are kept.
            ridge: lambda as a share of the mean diagonal of A'A over the kept columns; it is raised tenfold until the
                matrix has a Cholesky factor.

        Raises:
            InputError: the sums are not finite.
        """
        extended = extend(start, start_bias)
        sums = self.gram
        gram, kept = sums.select(columns), sums.with_ones(columns)
        factor, ridge = factorize(gram.matrix, gram.damping, ridge)
        # lambda for each column; the bias has none.
        penalty = ridge * gram.damping
        fitted = np.zeros_like(extended)
        right = self.cross[kept] + penalty[:, None] * extended[:, kept].T
        fitted[:, kept] = cho_solve((factor, True), right).T
        return Refit(*split(fitted, self.has_ones), ridge)

    def _check_finite(self, values: Array, subject: str) -> None:
        """Raise InputError if one of the values is NaN or infinite."""
        finite = sys.modules[type(values).__module__.partition(".")[0]].isfinite(values)
        if finite.all():
            return
        count = int((~finite).sum())
        raise InputError(
            f"{self.name}: {count} of {math.prod(values.shape)} {subject} on the calibration rows are NaN or infinite;"
            " check the weights of the model and the rows, or compute in float32",
            code=ErrorCode.NOT_FINITE,
            linear=self.name,
            subject=subject,
            count=count,
        )


def _numpy(sums: Array) -> np.ndarray:
    """A copy of sums on the CPU."""
    return sums.copy() if isinstance(sums, np.ndarray) else sums.cpu().numpy().copy()
