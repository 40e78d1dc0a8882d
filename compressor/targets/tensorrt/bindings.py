"""Differences between TensorRT 8.6, 10 and 11. Only this module detects the features of a version, by attribute names.

1. Types: from 10 on a network can be strongly typed, so that it computes in the types of the graph; in 11 every network
   is. For 8.6 the builder flags of the graph's types are set, with int8 if the graph is quantized; if it is not, the
   type of every layer is set too. These types are required, or preferred where 8.6 has no kernel that computes a layer
   in its type.
2. 8.6 has no 64-bit integers, no bfloat16 and no quantizers in fp8, reads operator sets up to 17, and reads quantized
   weights only as floats with a `QuantizeLinear` behind them.
3. cuBLAS and cuDNN are tactic sources until 10; they are left out, because they may not be installed.
4. The attributes for sizes of weights and of activations have been renamed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError, TargetMissingError, UsageError
from compressor.silence_libraries import one_line
from compressor.targets.base import Precision
from compressor.targets.cuda import Device

_EXTERNAL_TACTICS = ("CUBLAS", "CUBLAS_LT", "CUDNN")
_ARITHMETIC_LAYERS = frozenset(
    "ACTIVATION CONVOLUTION CUMULATIVE DECONVOLUTION EINSUM ELEMENTWISE FULLY_CONNECTED MATRIX_MULTIPLY NORMALIZATION"
    " PARAMETRIC_RELU POOLING RAGGED_SOFTMAX REDUCE RESIZE SCALE SOFTMAX UNARY".split()
)
"""Types of layers that compute; all other layers only move numbers, in any type."""

_ADA = (8, 9)
"""Compute capability of the first GPUs that compute in fp8."""
PREFER_TYPES = {"precision_constraints": "prefer"}
"""Replaces the constraint of `config_options` where a layer has no kernel in its type."""


@dataclass(frozen=True)
class Features:
    """Features of the installed TensorRT.

    Attributes:
        version: version of the library; the bindings may be of another patch version.
        strongly_typed: whether networks keep the types of the graph.
        int64: whether it supports 64-bit integers, and with them bfloat16, operator sets after 17 and weights in int8.
        precisions: numeric precisions that a graph may have.
        tactics: names of the tactic sources to use.
    """

    version: str
    strongly_typed: bool
    int64: bool
    precisions: tuple[Precision, ...]
    tactics: tuple[str, ...]

    def require(self, precision: Precision, device: Device) -> None:
        """Make sure that a precision is supported.

        Raises:
            UsageError: this version or the GPU does not compute in it.
        """
        if precision not in self.precisions:
            text = (
                f"{precision}: TensorRT {self.version} does not compute in it; use {' or '.join(self.precisions)}, or"
                " TensorRT 10 or newer"
            )
            raise UsageError(text, code=ErrorCode.UNSUPPORTED, field="precision", value=precision)
        if precision == "fp8" and device.capability < _ADA:
            text = f"fp8: needs a GPU from Ada (SM 8.9) on, and this is {device}; use --precision int8"
            raise UsageError(text, code=ErrorCode.UNSUPPORTED, field="precision", value=precision)


def library() -> ModuleType:
    """TensorRT's Python module.

    Raises:
        TargetMissingError: the module, its libraries or Polygraphy is not installed.
    """
    try:
        import polygraphy  # noqa: F401
        import tensorrt
    except ImportError as error:
        text = (
            f"TensorRT's Python packages are not installed ({one_line(error)}); pip install '.[trt]' tensorrt in a"
            " checkout of compressor"
        )
        raise TargetMissingError(text, code=ErrorCode.PACKAGE_MISSING, package=error.name or "tensorrt") from error
    return tensorrt


def features(trt: ModuleType) -> Features:
    """The features of a TensorRT module, detected by its attribute names."""
    strongly_typed = has_typing_flag(trt) or not hasattr(trt.BuilderFlag, "FP16")
    bfloat: tuple[Precision, ...] = ("bf16",) if hasattr(trt.DataType, "BF16") else ()
    fp8: tuple[Precision, ...] = ("fp8",) if strongly_typed and hasattr(trt.DataType, "FP8") else ()
    return Features(
        version=library_version(str(trt.__version__)),
        strongly_typed=strongly_typed,
        int64=hasattr(trt.DataType, "INT64"),
        precisions=("fp32", "fp16", *bfloat, "int8", *fp8),
        tactics=tuple(name for name in trt.TacticSource.__members__ if name not in _EXTERNAL_TACTICS),
    )


def has_typing_flag(trt: ModuleType) -> bool:
    """Whether networks are created with the flag that keeps the graph's types, which 11 has removed (case 1)."""
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def library_version(bindings: str, load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """The version of TensorRT's library, or of the bindings where the library reports none.

    Args:
        load: opens a library by name.
    """
    try:
        number = int(load(f"libnvinfer.so.{bindings.partition('.')[0]}").getInferLibVersion())
    except (OSError, AttributeError):
        number = 0
    if not number:
        return bindings
    unit = 10_000 if number >= 10_000 else 1_000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def config_options(trt: ModuleType, supported: Features, precision: Precision, *, quantized: bool) -> dict[str, Any]:
    """Arguments of Polygraphy's `CreateConfig`: tactic sources (case 3) and, for 8.6, types (case 1).

    Args:
        precision: numeric precision of a graph that is not quantized.
        quantized: whether the graph has quantization nodes.
    """
    options: dict[str, Any] = {"tactic_sources": [trt.TacticSource.__members__[name] for name in supported.tactics]}
    if not supported.strongly_typed:
        options |= {"fp16": precision == "fp16", "int8": quantized}
        if not quantized:
            options["precision_constraints"] = "obey"
    return options


def set_layer_types(trt: ModuleType, network: Any, types: Mapping[str, ir.DataType]) -> None:
    """Set the type that each arithmetic layer computes in to the type of its result, for 8.6 (case 1).

    This must not be used for quantized networks, whose results are of type fp32 where int8 is meant.

    Args:
        network: the network. Before the build it may report fp32 for types that were not set.
        types: tensor name -> element type in the graph; layers that the parser has added keep the reported type.
    """
    floating = {ir.DataType.FLOAT: trt.DataType.FLOAT, ir.DataType.FLOAT16: trt.DataType.HALF}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type.name not in _ARITHMETIC_LAYERS or not layer.num_outputs:
            continue
        result = layer.get_output(0)
        if result is None or result.is_shape_tensor:
            continue
        kind = floating.get(types[result.name]) if result.name in types else result.dtype
        if kind in floating.values():
            layer.precision = kind


def numpy_type(trt: ModuleType, engine: Any, name: str) -> np.dtype[Any]:
    """NumPy's element type of an engine's input or output.

    Raises:
        InputError: NumPy lacks the type.
    """
    kind = engine.get_tensor_dtype(name)
    try:
        return np.dtype(trt.nptype(kind))
    except TypeError as error:
        text = f"{name}: NumPy lacks its type {kind}; export the graph with inputs and outputs in fp32"
        raise InputError(text, code=ErrorCode.UNSUPPORTED, tensor=name, value=str(kind)) from error


def weight_bytes(trt: ModuleType, engine: Any) -> int | None:
    """Bytes of an engine's weights on the GPU; None where the version does not report them (case 4)."""
    statistic = getattr(getattr(trt, "EngineStat", None), "TOTAL_WEIGHTS_SIZE", None)
    get_statistic = getattr(engine, "get_engine_stat", None)
    return None if statistic is None or get_statistic is None else int(get_statistic(statistic))


def activation_bytes(engine: Any) -> int:
    """Bytes that an engine needs besides its weights, at the largest sizes of its profile (case 4)."""
    renamed = getattr(engine, "device_memory_size_v2", None)
    return int(engine.device_memory_size if renamed is None else renamed)
