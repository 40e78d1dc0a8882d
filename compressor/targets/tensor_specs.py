"""Inputs and outputs of a graph or of a served model, and the serving protocol's names of their types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError

FREE = -1
"""An axis of any length."""
_TYPES = {"FLOAT": "FP32", "FLOAT16": "FP16", "DOUBLE": "FP64", "BFLOAT16": "BF16", "STRING": "BYTES"}
_TYPES |= {name: name for name in "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64".split()}
"""KServe v2's names by ONNX's."""
_NAMED = {name: ir.DataType[kind] for kind, name in _TYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
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
        """KServe's name of the element type, `FP32`."""
        return _TYPES[self.dtype.name]

    @property
    def has_batch(self) -> bool:
        """Whether the first axis can be any number of rows."""
        return bool(self.dims) and self.dims[0] == FREE

    @property
    def numpy(self) -> np.dtype[Any]:
        """NumPy's element type; `object` for text."""
        return self.dtype.numpy()

    @property
    def value(self) -> ir.Value:
        """The same as a graph has it."""
        shape = ir.Shape([size if size != FREE else None for size in self.dims])
        return ir.Value(name=self.name, shape=shape, type=ir.TensorType(self.dtype))


def described(name: str, type_: str, dims: Iterable[Any]) -> TensorSpec:
    """What a server says of an input or output.

    Raises:
        InputError: a type that the protocol does not have.
    """
    if type_ not in _NAMED:
        raise InputError(f"{name}: the server says its type is {type_}, which is none of {', '.join(_NAMED)}")
    return TensorSpec(name, _NAMED[type_], tuple(map(int, dims)))


def inputs_of(model: ir.Model, path: Path) -> tuple[TensorSpec, ...]:
    """What has to be given: inputs that are no weights.

    Raises:
        InputError: one has a type or a shape that cannot be served.
    """
    return _tensors((value for value in model.graph.inputs if not value.is_initializer()), path)


def outputs_of(model: ir.Model, path: Path) -> tuple[TensorSpec, ...]:
    """What comes out; raises as `inputs_of` does."""
    return _tensors(model.graph.outputs, path)


def _tensors(values: Iterable[ir.Value], path: Path) -> tuple[TensorSpec, ...]:
    return tuple(_tensor(value, path) for value in values)


def _tensor(value: ir.Value, path: Path) -> TensorSpec:
    if value.dtype is None or value.dtype.name not in _TYPES:
        told = value.dtype.name if value.dtype else "no type"
        raise InputError(
            f"{path}: {value.name} is {told}, for which serving protocols have no name; export it otherwise"
        )
    if value.shape is None:
        raise InputError(f"{path}: {value.name} has no shape; export the graph again, with shapes")
    return TensorSpec(str(value.name), value.dtype, tuple(dim if isinstance(dim, int) else FREE for dim in value.shape))
