"""Inputs and outputs of a graph as Triton's configuration names them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError

FREE = -1
"""An axis of any length."""
_TYPES = {"FLOAT": "TYPE_FP32", "FLOAT16": "TYPE_FP16", "DOUBLE": "TYPE_FP64", "BFLOAT16": "TYPE_BF16"}
_TYPES |= {name: f"TYPE_{name}" for name in "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64".split()}


@dataclass(frozen=True)
class Tensor:
    """One input or output.

    Attributes:
        name: the graph's.
        dtype: the graph's element type.
        dims: every axis, the batch among them; -1: of any length.
    """

    name: str
    dtype: ir.DataType
    dims: tuple[int, ...]

    @property
    def type(self) -> str:
        """Triton's name of the element type."""
        return _TYPES[self.dtype.name]

    @property
    def has_batch(self) -> bool:
        """Whether the first axis can be any number of rows."""
        return bool(self.dims) and self.dims[0] == FREE

    @property
    def numpy(self) -> np.dtype:
        """NumPy's element type."""
        return self.dtype.numpy()


def inputs_of(model: ir.Model, path: Path) -> tuple[Tensor, ...]:
    """What has to be given: inputs that are no weights.

    Raises:
        InputError: one has a type or a shape that cannot be served.
    """
    return _tensors((value for value in model.graph.inputs if not value.is_initializer()), path)


def outputs_of(model: ir.Model, path: Path) -> tuple[Tensor, ...]:
    """What comes out; raises as `inputs_of` does."""
    return _tensors(model.graph.outputs, path)


def _tensors(values: Iterable[ir.Value], path: Path) -> tuple[Tensor, ...]:
    return tuple(_tensor(value, path) for value in values)


def _tensor(value: ir.Value, path: Path) -> Tensor:
    if value.dtype is None or value.dtype.name not in _TYPES:
        told = value.dtype.name if value.dtype else "no type"
        raise InputError(
            f"{path}: {value.name} is {told}, which Triton's configuration cannot name; export it otherwise"
        )
    if value.shape is None:
        raise InputError(f"{path}: {value.name} has no shape; export the graph again, with shapes")
    return Tensor(str(value.name), value.dtype, tuple(dim if isinstance(dim, int) else FREE for dim in value.shape))
