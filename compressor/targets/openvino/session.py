"""OpenVINO's settings, which are recorded, and its graphs: reading, compiling, running, and what is executed.

The process that measures memory loads this module first, so it imports no more than running a graph needs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compressor.environment import bfloat16_instructions
from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.silence_libraries import one_line
from compressor.targets.base import Feeds, Precision
from compressor.targets.cores import usable_cores
from compressor.targets.openvino.batches import EngineRequest
from compressor.targets.options import Shape

try:
    import openvino
except ImportError as error:
    raise TargetMissingError.of_package("openvino", "openvino", "OpenVINO is not installed") from error

_PREFIXES = ("Exception from ", "Check ", "FrontEnd API failed", "Model wasn't fully converted", "Summary:")
"""Beginnings of the lines of OpenVINO's messages that name its source files and stages."""
DEVICE = "CPU"
"""OpenVINO's name of the processor."""
OPENVINO_BFLOAT16 = ("amx_bf16", "avx512_bf16")
"""Instruction sets with which OpenVINO computes in bfloat16 natively, by their Linux names."""
_CORE = openvino.Core()
_INFO = "compressor"
"""Section of a graph's runtime information that holds the facts of `write_model`."""


@dataclass(frozen=True)
class Layer:
    """One layer of a compiled model.

    Attributes:
        kind: OpenVINO's type of the layer, e.g. `FullyConnected`.
        precision: numeric precision that it computes in, e.g. `f32`, `u8`.
        nodes: names of the graph's nodes that it executes; OpenVINO leaves out some that it has merged.
    """

    kind: str
    precision: str
    nodes: frozenset[str]


@dataclass(frozen=True)
class Names:
    """Names of a graph's inputs and outputs in ONNX, in order; OpenVINO may know a tensor by several names."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def check_precision(precision: Precision) -> None:
    """Raise TargetMissingError where engines of a precision cannot be built.

    Without instructions for bfloat16 OpenVINO accepts the setting all the same: it computes in float32, or simulates.
    """
    if precision not in ("fp32", "bf16", "int8"):
        reason = "engines of OpenVINO compute in fp32, bf16 or int8 here; use --precision fp32, or --target trt"
    elif precision == "bf16" and not native_bfloat16():
        flags = " or ".join(OPENVINO_BFLOAT16)
        reason = f"this processor has no instructions for products of bfloat16 ({flags}); use --precision fp32"
    else:
        return
    raise TargetMissingError(f"{precision}: {reason}", code=ErrorCode.UNSUPPORTED, field="precision", value=precision)


def native_bfloat16() -> bool:
    """Whether OpenVINO multiplies matrices of bfloat16 natively on this processor."""
    return any(flag in OPENVINO_BFLOAT16 for flag in bfloat16_instructions())


def session_settings(
    threads: int | None, shapes: Iterable[Shape] = (), inference_precision: str = "f32"
) -> dict[str, Any]:
    """Runtime and options of a compiled model, as recorded in reports; `compile_model` reads them.

    Args:
        threads: threads per call; None: one per core.
        shapes: fixed shapes that the graph is compiled for too.
        inference_precision: OpenVINO's name of the type of products in floats, `f32` or `bf16`; a processor without
            native bfloat16 computes in `f32` in any case.
    """
    settings: dict[str, Any] = {
        "runtime": f"openvino {openvino.__version__.partition('-')[0]}",
        "provider": DEVICE,
        "intra_op_threads": threads or usable_cores(),
        # OpenVINO computes in bfloat16 by default on processors that have it.
        "inference_precision": inference_precision if native_bfloat16() else "f32",
        "performance_hint": "LATENCY",
        # Engines with fewer threads than cores may run beside each other, and would be pinned to the same cores.
        "cpu_pinning": threads is None or threads >= usable_cores(),
    }
    if shapes := list(shapes):
        settings["shapes"] = [f"{batch}x{seq}" for batch, seq in shapes]
    return settings


def read_model(path: Path) -> openvino.Model:
    """A graph in ONNX or in OpenVINO's format.

    Raises:
        InputError: OpenVINO cannot read it; the message names the operator where there is one.
    """
    try:
        return _CORE.read_model(path)
    except Exception as error:  # OpenVINO raises RuntimeError and others
        raise InputError(
            f"{path}: OpenVINO cannot read it ({failure_reason(error)}); use --target ort, or build it again",
            code=ErrorCode.RUNTIME_FAILED,
            path=path,
            runtime="openvino",
        ) from error


def compile_model(
    model: openvino.Model, path: Path, settings: Mapping[str, Any], cache: Path | None = None
) -> openvino.CompiledModel:
    """Compile a graph for this processor.

    Args:
        model: the graph.
        path: its file, for messages.
        settings: from `session_settings`.
        cache: folder of compiled models, read and written; None: the graph is compiled in any case.

    Raises:
        InputError: OpenVINO cannot compile it.
    """
    options = {
        "INFERENCE_PRECISION_HINT": settings["inference_precision"],
        "PERFORMANCE_HINT": settings["performance_hint"],
        "INFERENCE_NUM_THREADS": settings["intra_op_threads"],
        "ENABLE_CPU_PINNING": settings["cpu_pinning"],
        **({} if cache is None else {"CACHE_DIR": str(cache)}),
    }
    try:
        return _CORE.compile_model(model, DEVICE, options)
    except Exception as error:  # OpenVINO raises RuntimeError and others
        raise InputError(
            f"{path}: OpenVINO cannot compile it ({failure_reason(error)}); use --target ort",
            code=ErrorCode.RUNTIME_FAILED,
            path=path,
            runtime="openvino",
        ) from error


class DeferredRequest:
    """A request for a graph that is compiled when the first batch needs it.

    Args:
        model: the graph.
        path: its file, for messages.
        settings: from `session_settings`.
    """

    def __init__(self, model: openvino.Model, path: Path, settings: Mapping[str, Any]) -> None:
        self._graph = model, path, settings

    @functools.cached_property
    def _request(self) -> EngineRequest:
        return EngineRequest(compile_model(*self._graph).create_infer_request())

    def run(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """The outputs in the graph's order; see `EngineRequest.run`."""
        return self._request.run(arrays)


def run_request(request: EngineRequest | DeferredRequest, names: Names, feeds: Feeds) -> dict[str, np.ndarray]:
    """Outputs by name. Feeds that the graph has no input for are ignored.

    Args:
        request: runs the graph.
        names: names of the graph's inputs and outputs.
        feeds: one batch of inputs.

    Raises:
        InputError: an input is missing, or the graph cannot run on these inputs.
    """
    try:
        outputs = request.run([feeds[name] for name in names.inputs])
    except KeyError as error:
        raise InputError(
            f"{error.args[0]}: the graph has this input, and it is missing; pass {', '.join(names.inputs)}",
            code=ErrorCode.TENSOR_MISMATCH,
            tensor=error.args[0],
        ) from error
    except InputError:  # a deferred request cannot compile the graph
        raise
    except Exception as error:  # OpenVINO raises RuntimeError and others
        raise InputError(
            f"OpenVINO cannot run the graph on these inputs ({failure_reason(error)}); pass arrays of its inputs'"
            " shapes",
            code=ErrorCode.RUNTIME_FAILED,
        ) from error
    return dict(zip(names.outputs, outputs, strict=True))


def executed_layers(compiled: openvino.CompiledModel) -> list[Layer]:
    """The layers that OpenVINO executes, after all of its optimizations."""
    layers = []
    for node in compiled.get_runtime_model().get_ordered_ops():
        facts = {name: str(value.value) for name, value in node.get_rt_info().items()}
        names = frozenset(filter(None, facts.get("originalLayersNames", "").split(",")))
        layers.append(Layer(facts["layerType"], facts.get("runtimePrecision", ""), names))
    return layers


def failure_reason(error: BaseException) -> str:
    """The part of OpenVINO's message that says what is wrong, on one line."""
    lines = [line.strip("- ") for line in str(error).splitlines() if line and not line.startswith(_PREFIXES)]
    return one_line(" ".join(lines) or error)


def write_model(model: openvino.Model, out: Path, info: Mapping[str, Any]) -> None:
    """Write a graph in OpenVINO's format, with weights in the precision that they have.

    Args:
        model: the graph.
        out: the file to write, `.xml`; the weights go beside it.
        info: facts to store in the graph, in JSON; `stored_info` returns them.
    """
    model.set_rt_info(json.dumps(info), _INFO)
    openvino.save_model(model, out, compress_to_fp16=False)


def stored_info(model: openvino.Model) -> dict[str, Any]:
    """The facts that `write_model` stored in a graph; empty for a graph of another origin."""
    if not model.has_rt_info(_INFO):
        return {}
    info: dict[str, Any] = json.loads(str(model.get_rt_info(_INFO).value))
    return info


def tensor_names(model: openvino.Model) -> Names:
    """Names of the inputs and outputs, as `write_model` stored them, else as OpenVINO has them."""
    info = stored_info(model)
    inputs, outputs = (
        info.get(name, [tensor.any_name for tensor in tensors])
        for name, tensors in (("inputs", model.inputs), ("outputs", model.outputs))
    )
    return Names(tuple(inputs), tuple(outputs))
