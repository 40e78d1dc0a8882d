"""Gram matrices of the inputs of a linear, their factors, and their file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from compressor.errors import ErrorCode, InputError

_log = logging.getLogger(__name__)

_LEAST_DAMP = 1e-8
"""The damping that follows zero when a factorisation fails."""
_MOST_DAMP = 1e4
"""A matrix that has no factor at this damping is refused."""


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
        """What a damping of one adds to the diagonal: the mean diagonal of the inputs; nothing for the ones."""
        diagonal = np.diagonal(self.matrix)[: self.inputs]
        scale = (diagonal.mean() if len(diagonal) else 0.0) or 1.0
        return np.append(np.full(self.inputs, scale), np.zeros(int(self.has_ones)))

    def with_ones(self, columns: np.ndarray) -> np.ndarray:
        """Indices of input columns, followed by that of the ones if there are any."""
        return np.append(columns, [self.inputs] * self.has_ones).astype(np.intp)

    def select(self, columns: np.ndarray) -> Gram:
        """The Gram matrix of some input columns, and of the ones if there are any."""
        kept = self.with_ones(columns)
        return Gram(self.matrix[np.ix_(kept, kept)], self.has_ones)


def extend(weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """The weight with the bias, if there is one, as its last column, float64."""
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
        damped = matrix.copy()
        damped[np.diag_indices_from(damped)] += damp * damping
        try:
            return np.linalg.cholesky(damped), damp
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

    Args:
        path: the file; it must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with safetensors.safe_open(path, "numpy") as file:
            keys: list[str] = list(file.keys())
        self._linears = [key.removesuffix(".matrix") for key in keys if key.endswith(".matrix")]

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
