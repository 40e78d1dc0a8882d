"""Linears fitted to sums over the tokens that they read: Gram matrices, their damping and their file, and refits.

With inputs A of the model as pruned so far, the weights of a linear are the ridge regression to its targets T that
stays close to the weights W_0 of the second-order step: argmin ||A W' + b - T||^2 + lambda ||W - W_0||^2. Where T is
the original model's output and residual less the residual of the pruned model, a refit repairs the error of all earlier
ones, as the layer-wise reconstruction of K-prune does (Park et al. 2024, "Accurate retraining-free pruning").
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import safetensors
import safetensors.numpy

from compressor.errors import ErrorCode, InputError
from compressor.units.prunable import LinearWeights

_log = logging.getLogger(__name__)

_LEAST_DAMP = 1e-8
"""The damping that is tried after zero when a factorisation fails."""
_MOST_DAMP = 1e4
"""A matrix without a Cholesky factor at this damping is refused."""

Array = Any
"""An array of NumPy, or a tensor of PyTorch on any device."""


@dataclass(frozen=True)
class CallTokens:
    """The tokens of one call of a linear on one batch, without padding.

    Attributes:
        linear: path of the linear.
        batch: number of the batch.
        number: number of the call among those of the linear in a forward.
        mask: the tokens of its input that are not padding, usually `[batch, position]`, on the CPU.
        inputs: its inputs, `[tokens, in]`.
        targets: the outputs, bias included, for which the residual stream is that of the dense network,
            `[tokens, out]`; None: they are not computed.
    """

    linear: str
    batch: int
    number: int
    mask: Array
    inputs: Array
    targets: Array | None = None


@dataclass(frozen=True, eq=False)
class Gram:
    """Weighted sum of outer products of the inputs of a linear.

    Attributes:
        matrix: `[inputs, inputs]`, or `[inputs + 1, inputs + 1]` with `has_ones`, float64.
        has_ones: whether the last row and column belong to an input that is always one, whose weight is the bias.
    """

    matrix: np.ndarray
    has_ones: bool

    @property
    def inputs(self) -> int:
        """Number of inputs of the linear, without the column of ones."""
        return len(self.matrix) - self.has_ones

    @property
    def damping(self) -> np.ndarray:
        """The numbers that a damping of one adds to the diagonal: the mean diagonal of the inputs; zero for the
        ones."""
        diagonal = np.diagonal(self.matrix)[: self.inputs]
        scale = (diagonal.mean() if len(diagonal) else 0.0) or 1.0
        return np.append(np.full(self.inputs, scale), np.zeros(int(self.has_ones)))

    def with_ones(self, columns: np.ndarray) -> np.ndarray:
        """Indices of input columns, followed by that of the ones if there are any."""
        return np.append(columns, [self.inputs] * self.has_ones).astype(np.intp)


def damped(matrix: np.ndarray, damping: np.ndarray, damp: float) -> tuple[np.ndarray, float]:
    """`matrix + damp * diag(damping)`, and the damping used, which is raised tenfold until it is positive definite.

    Raises:
        InputError: the matrix is not finite, or not positive definite with any damping.
    """
    if not np.isfinite(matrix).all():
        text = "the sums over the calibration rows are NaN or infinite; check the weights of the model and the rows"
        raise InputError(text, code=ErrorCode.NOT_FINITE)
    while True:
        result = matrix.copy()
        result[np.diag_indices_from(result)] += damp * damping
        try:
            np.linalg.cholesky(result)
            return result, damp
        except np.linalg.LinAlgError as error:
            if damp >= _MOST_DAMP:
                raise InputError(
                    "the sums over the calibration rows are not positive definite, or every token has weight zero; use"
                    " more rows, or rows of the kind that the model serves",
                    code=ErrorCode.INVALID_ROWS,
                ) from error
            raised = max(10 * damp, _LEAST_DAMP)
            _log.info("no Cholesky factor with damping %g; continuing with %g", damp, raised)
            damp = raised


class StoredGrams(Mapping[str, Gram]):
    """Module path of a linear -> Gram matrix of its inputs, read from the file at each access.

    Together they may take more memory than the model.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with safetensors.safe_open(path, "numpy") as file:
            names: list[str] = list(file.keys())
        self._linears = [name.removesuffix(".matrix") for name in names if name.endswith(".matrix")]

    def __getitem__(self, linear: str) -> Gram:
        if linear not in self._linears:
            raise KeyError(linear)
        with safetensors.safe_open(self._path, "numpy") as file:
            return Gram(file.get_tensor(f"{linear}.matrix"), bool(file.get_tensor(f"{linear}.has_ones")))

    def __iter__(self) -> Iterator[str]:
        return iter(self._linears)

    def __len__(self) -> int:
        return len(self._linears)


def write_grams(grams: Mapping[str, Gram], path: Path) -> None:
    """Write the file of `StoredGrams`."""
    tensors = {f"{name}.matrix": gram.matrix for name, gram in grams.items()}
    tensors |= {f"{name}.has_ones": np.array(gram.has_ones) for name, gram in grams.items()}
    safetensors.numpy.save_file(tensors, path)


class RefitSums:
    """Sums over tokens for the selection of inputs of a linear and for its refit.

    Tokens are arrays of NumPy or tensors of PyTorch. Products are computed on the device of the activations, in float64
    for float64 activations and else in float32; the sums are float64 on the device of the first ones.

    Args:
        outputs: number of its outputs; None: there are no targets and only `gram` is needed.
        has_ones: see `Gram`; whether the linear has a bias.
    """

    def __init__(self, inputs: int, outputs: int | None = None, *, has_ones: bool, name: str = "a linear") -> None:
        self.name, self.outputs, self.has_ones = name, outputs, has_ones
        self._size = inputs + has_ones
        self._sums: tuple[Array, Array] | None = None

    @property
    def gram(self) -> Gram:
        """The Gram matrix of the inputs so far."""
        matrix = np.zeros((self._size, self._size)) if self._sums is None else _numpy(self._sums[0])
        return Gram((matrix + matrix.T) / 2, self.has_ones)

    @property
    def cross(self) -> np.ndarray:
        """Sum of the products of inputs, and of the ones if there are any, with targets: `[inputs, outputs]`."""
        return np.zeros((self._size, self.outputs or 0)) if self._sums is None else _numpy(self._sums[1])

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
        xp = _library(inputs)  # the functions below have one signature in both
        kind = {"dtype": xp.promote_types(inputs.dtype, xp.float32), "device": inputs.device}
        columns = [xp.asarray(inputs, **kind)]
        if self.has_ones:
            columns.append(xp.ones((*inputs.shape[:-1], 1), **kind))
        if targets is not None:
            columns.append(xp.asarray(targets, **kind))
        rows = xp.concatenate(columns, -1)
        scaled = rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
        if weights is not None:
            scales = xp.asarray(weights, **kind).reshape(-1)
            self._check_finite(scales, "weights")
            rows, scales = rows[scales > 0], scales[scales > 0]
            scaled = rows * xp.sqrt(scales)[:, None]
        products = scaled[:, : self._size].T @ scaled
        if not xp.isfinite(products).all():  # so they are wherever an activation is not, and are fewer
            self._check_finite(rows, "activations")
            self._check_finite(products, "sums of products of activations")
        gram, cross = products[:, : self._size], products[:, self._size :]
        if self._sums is None:
            self._sums = xp.asarray(gram, dtype=xp.float64), xp.asarray(cross, dtype=xp.float64)
        else:
            for total, part in zip(self._sums, (gram, cross), strict=True):
                total += xp.asarray(part, device=total.device)

    def solve(self, start: LinearWeights, *, ridge: float) -> LinearWeights:
        """The weights that fit the targets, near those of `start`.

        Args:
            start: the weights W_0 before the refit. Their bias only says that there is one: the refitted bias is not
                held near it.
            ridge: lambda as a share of the mean diagonal of A'A; it is raised tenfold until the matrix has a Cholesky
                factor.

        Raises:
            InputError: the sums are not finite.
        """
        gram = self.gram
        matrix, ridge = damped(gram.matrix, gram.damping, ridge)
        penalty = ridge * gram.damping[:, None]  # lambda for each column; the bias has none
        fitted = np.linalg.solve(matrix, self.cross + penalty * start.extended.T).T
        return LinearWeights.of(fitted, ridge, has_ones=self.has_ones)

    def _check_finite(self, values: Array, subject: str) -> None:
        finite = _library(values).isfinite(values)
        if finite.all():
            return
        count = int((~finite).sum())
        text = (
            f"{self.name}: {count} of {math.prod(values.shape)} {subject} on the calibration rows are NaN or infinite;"
            " check the weights of the model and the rows, or compute in float32"
        )
        raise InputError(text, code=ErrorCode.NOT_FINITE, linear=self.name, subject=subject, count=count)


def is_token_mask(mask: Array | None, shape: Sequence[int]) -> TypeGuard[Array]:
    """Whether there is a mask of padding that has the axes of tokens, or those are flattened row by row."""
    return mask is not None and tuple(shape) in (tuple(mask.shape), (math.prod(mask.shape),))


def count_in_proportion(first: int, masks: Sequence[Array | None], sizes: Sequence[int]) -> int:
    """The number of tokens in all batches, from that in the first, by masks of padding or else by sizes of inputs."""
    counts = [size if mask is None else np.count_nonzero(mask) for mask, size in zip(masks, sizes, strict=True)]
    if first % max(counts[0], 1):  # the mask is not that of these tokens
        counts = list(sizes)
    return int(first * sum(counts) // max(counts[0], 1))


def _library(values: Array) -> Any:
    """NumPy or PyTorch, whichever has these values."""
    return sys.modules[type(values).__module__.partition(".")[0]]


def _numpy(sums: Array) -> np.ndarray:
    """A copy of sums on the CPU."""
    return sums.copy() if isinstance(sums, np.ndarray) else sums.cpu().numpy().copy()
