"""What differs between TensorRT 8.6, 10 and 11: the library is asked by name, here and nowhere else.

1. Types: from 10 on a network is strongly typed, that is it computes in the types that the graph says; 11 has no other.
   8.6 is given the flags of the types that are in the graph, and every layer that computes its own, unless the graph is
   quantized; it must compute in them, or where it has no kernel that does, should.
2. 8.6 has no 64-bit integers, no bfloat16, and reads operator sets up to 17.
3. cuBLAS and cuDNN are tactic sources until 10; they are left out, for they need not be installed.
4. Sizes of weights and of activations have been renamed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError, TargetMissingError, UsageError
from compressor.targets.base import Precision

_FOREIGN = ("CUBLAS", "CUBLAS_LT", "CUDNN")
_ARITHMETIC = frozenset(
    "ACTIVATION CONVOLUTION CUMULATIVE DECONVOLUTION EINSUM ELEMENTWISE FULLY_CONNECTED MATRIX_MULTIPLY NORMALIZATION"
    " PARAMETRIC_RELU POOLING RAGGED_SOFTMAX REDUCE RESIZE SCALE SOFTMAX UNARY".split()
)
"""Layers that compute. All others only move numbers about, in whatever type they have."""

PREFERRED = {"precision_constraints": "prefer"}
"""What `config_options` would give if the types of layers were asked for and not required."""


@dataclass(frozen=True)
class Api:
    """What the installed TensorRT has.

    Attributes:
        version: of the library, not of the bindings, which may be another patch's.
        strongly_typed: a network keeps the graph's types.
        wide: it has 64-bit integers, and with them bfloat16 and the operator sets after 17.
        precisions: numbers that a graph may be in.
        tactics: names of the tactic sources that are left on.
    """

    version: str
    strongly_typed: bool
    wide: bool
    precisions: tuple[Precision, ...]
    tactics: tuple[str, ...]

    def require(self, precision: Precision) -> None:
        """Raise UsageError where it does not compute in a precision."""
        if precision not in self.precisions:
            raise UsageError(
                f"{precision}: TensorRT {self.version} has no such numbers; use {' or '.join(self.precisions)}, or"
                " TensorRT 10 or newer"
            )


def library() -> ModuleType:
    """TensorRT's Python module.

    Raises:
        TargetMissingError: it is not installed, or its libraries are not.
    """
    try:
        import polygraphy  # noqa: F401
        import tensorrt
    except ImportError as error:
        raise TargetMissingError(
            f"TensorRT's Python packages are not here ({' '.join(str(error).split())}); pip install"
            " 'compressor[trt]' tensorrt"
        ) from error
    found: ModuleType = tensorrt
    return found


def api(trt: ModuleType) -> Api:
    """What a TensorRT module has, found by name."""
    wide = hasattr(trt.DataType, "INT64")
    bfloat = hasattr(trt.DataType, "BF16")
    return Api(
        version=_version(str(trt.__version__)),
        strongly_typed=can_ask_types(trt) or not hasattr(trt.BuilderFlag, "FP16"),
        wide=wide,
        precisions=("fp32", "fp16", "bf16") if bfloat else ("fp32", "fp16"),
        tactics=tuple(name for name in trt.TacticSource.__members__ if name not in _FOREIGN),
    )


def can_ask_types(trt: ModuleType) -> bool:
    """Whether a network has to be told to keep the graph's types: 11 has left the flag without a meaning."""
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def _version(bindings: str) -> str:
    """Of the library that the bindings have loaded, as its header numbers it; theirs where it does not tell."""
    try:
        number = int(ctypes.CDLL(f"libnvinfer.so.{bindings.partition('.')[0]}").getInferLibVersion())
    except (OSError, AttributeError):
        number = 0
    if not number:
        return bindings
    unit = 10_000 if number >= 10_000 else 1_000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def config_options(trt: ModuleType, of: Api, precision: Precision, *, quantized: bool) -> dict[str, Any]:
    """Arguments of Polygraphy's `CreateConfig` by version: tactic sources (case 3), on 8.6 types (case 1)."""
    options: dict[str, Any] = {"tactic_sources": [trt.TacticSource.__members__[name] for name in of.tactics]}
    if not of.strongly_typed:
        options |= {"fp16": precision == "fp16", "int8": quantized}
        if not quantized:
            options["precision_constraints"] = "obey"
    return options


def keep_types(trt: ModuleType, network: Any, types: Mapping[str, ir.DataType]) -> None:
    """Ask of every layer of a network that is not strongly typed to compute in the type of its result (case 1).

    Not of one that is quantized: its results say fp32 where int8 is meant.

    Args:
        types: of the graph's tensors, by name: before it is built, such a network may call fp32 what was not set.
            Layers that the parser adds of its own are taken at their word.
    """
    floating = {ir.DataType.FLOAT: trt.DataType.FLOAT, ir.DataType.FLOAT16: trt.DataType.HALF}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type.name not in _ARITHMETIC or not layer.num_outputs:
            continue
        result = layer.get_output(0)
        if result is None or result.is_shape_tensor:
            continue
        kind = floating.get(types[result.name]) if result.name in types else result.dtype
        if kind in floating.values():
            layer.precision = kind


def numpy_type(trt: ModuleType, engine: Any, name: str) -> np.dtype[Any]:
    """Of an engine's input or output.

    Raises:
        InputError: NumPy has no such numbers.
    """
    kind = engine.get_tensor_dtype(name)
    try:
        return np.dtype(trt.nptype(kind))
    except TypeError as error:
        raise InputError(
            f"{name}: is {kind}, which NumPy has not; export the graph with inputs and outputs in fp32"
        ) from error


def weight_bytes(trt: ModuleType, engine: Any) -> int | None:
    """Bytes of an engine's weights on the GPU; None where the version does not tell (case 4)."""
    statistic = getattr(getattr(trt, "EngineStat", None), "TOTAL_WEIGHTS_SIZE", None)
    told = getattr(engine, "get_engine_stat", None)
    return None if statistic is None or told is None else int(told(statistic))


def activation_bytes(engine: Any) -> int:
    """Bytes that an engine needs beside its weights, at the largest sizes it takes (case 4)."""
    renamed = getattr(engine, "device_memory_size_v2", None)
    return int(engine.device_memory_size if renamed is None else renamed)
