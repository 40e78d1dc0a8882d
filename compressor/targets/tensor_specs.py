"""Names, types and shapes of the inputs and outputs of a graph or of a served model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError

PIXELS = "pixel_values"
"""Name of the input that takes images."""
FREE = -1
"""The size of an axis that can have any length."""
_KSERVE_TYPES = {"FLOAT": "FP32", "FLOAT16": "FP16", "DOUBLE": "FP64", "BFLOAT16": "BF16", "STRING": "BYTES"}
_KSERVE_TYPES |= {name: name for name in "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64".split()}
"""ONNX element type -> its name in the KServe v2 protocol."""
_ONNX_TYPES = {name: ir.DataType[kind] for kind, name in _KSERVE_TYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """An input or output.

    Attributes:
        name: name in the graph.
        dtype: element type.
        dims: size of every axis, the batch included; -1: any length.
    """

    name: str
    dtype: ir.DataType
    dims: tuple[int, ...]

    @property
    def type(self) -> str:
        """The element type's name in the KServe v2 protocol, e.g. `FP32`."""
        return _KSERVE_TYPES[self.dtype.name]

    @property
    def has_batch(self) -> bool:
        """Whether the first axis can have any length."""
        return bool(self.dims) and self.dims[0] == FREE

    @property
    def numpy(self) -> np.dtype[Any]:
        """NumPy's element type; `object` for text."""
        return self.dtype.numpy()

    @property
    def value(self) -> ir.Value:
        """The tensor as a value of an ONNX graph."""
        shape = ir.Shape([size if size != FREE else None for size in self.dims])
        return ir.Value(name=self.name, shape=shape, type=ir.TensorType(self.dtype))


def spec_from_server(name: str, type_: str, dims: Iterable[Any]) -> TensorSpec:
    """An input or output from the metadata of a served model.

    Args:
        type_: name of its element type in the KServe v2 protocol.
        dims: size of every axis; -1: any length.

    Raises:
        InputError: the protocol has no such type.
    """
    if type_ not in _ONNX_TYPES:
        text = f"{name}: the server reports the type {type_}; supported are {', '.join(_ONNX_TYPES)}"
        raise InputError(text, code=ErrorCode.UNSUPPORTED, tensor=name, value=type_)
    return TensorSpec(name, _ONNX_TYPES[type_], tuple(map(int, dims)))


def specs_of(values: Iterable[ir.Value], path: Path) -> tuple[TensorSpec, ...]:
    """The inputs or outputs of a graph that are not weights.

    Raises:
        InputError: a value has no shape, or a type that serving protocols lack.
    """
    return tuple(_spec(value, path) for value in values if not value.is_initializer())


def _spec(value: ir.Value, path: Path) -> TensorSpec:
    if value.dtype is None or value.dtype.name not in _KSERVE_TYPES:
        kind = value.dtype.name if value.dtype else "unknown"
        text = f"{path}: the type of {value.name} is {kind}, which serving protocols lack; export it with another type"
        raise InputError(text, code=ErrorCode.UNSUPPORTED, path=path, tensor=value.name, value=kind)
    if value.shape is None:
        text = f"{path}: {value.name} has no shape; export the graph again, with shapes"
        raise InputError(text, code=ErrorCode.TENSOR_MISMATCH, path=path, tensor=value.name)
    return TensorSpec(str(value.name), value.dtype, tuple(dim if isinstance(dim, int) else FREE for dim in value.shape))
