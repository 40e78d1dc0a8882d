"""Read, compile, cache and run graphs in OpenVINO, with the settings that reports record.

The process that measures memory loads this module, so it imports no more than running a graph needs.

A graph may be compiled for fixed shapes too, and is faster with them: OpenVINO then chooses memory and kernels when it
compiles.

Compiled models are kept in the user's cache, so that an engine loads faster the second time. Each engine has a folder,
named by a digest of its graph, its settings, the processor and OpenVINO's version. OpenVINO writes the compiled models
there, and compiles a model again if its file is damaged or is for other weights, another version or other instructions.
A compiled model from the cache does not report all names of the nodes that its layers execute, so the layers of the
first compilation are stored beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compressor.environment import bfloat16_instructions, int8_instructions, processor
from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.silence_libraries import one_line
from compressor.targets.base import Feeds, Precision, Shape, missing_input, parse_shape
from compressor.targets.machine import usable_cores, user_cache
from compressor.targets.openvino.batches import CompiledGraph, EngineRequest, at_shape
from compressor.targets.peak_memory import resident_bytes
from compressor.workdir import file_lock, write_json

try:
    import openvino
    from openvino import opset13 as ops
except ImportError as error:
    raise TargetMissingError.of_package("openvino", "openvino", "OpenVINO is not installed") from error

_PREFIXES = ("Exception from ", "Check ", "FrontEnd API failed", "Model wasn't fully converted", "Summary:")
"""Beginnings of the lines of OpenVINO's messages that name its source files and stages."""
_UNCONVERTED = re.compile(r"^-- (?:No conversion rule found for operations|Conversion is failed for): (.+)$", re.M)
"""The operators that OpenVINO's message says it cannot convert."""
DEVICE = "CPU"
"""OpenVINO's name of the processor."""
OPENVINO_BFLOAT16 = ("amx_bf16", "avx512_bf16")
"""Instruction sets with which OpenVINO computes in bfloat16 natively, by their Linux names."""
_CORE = openvino.Core()
_INFO = "compressor"
"""Section of a graph's runtime information that holds the facts of `write_model`."""
_LAYERS = "layers.json"
_MAX_ENGINES = 32
_MAX_BYTES = 4 * 2**30
"""Maximum number and size of the engines in the cache; those used longest ago are removed."""
logger = logging.getLogger(__name__)


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


def check_precision(precision: Precision) -> None:
    """Raise TargetMissingError where engines of a precision cannot be built.

    Without instructions for bfloat16, OpenVINO accepts the setting but computes in float32, or emulates bfloat16.
    """
    if precision not in ("fp32", "bf16", "int8"):
        reason = "engines of OpenVINO compute in fp32, bf16 or int8 here; use --precision fp32, or --target trt"
    elif precision == "bf16" and not native_bfloat16():
        flags = " or ".join(OPENVINO_BFLOAT16)
        reason = f"this processor has no instructions for bfloat16 matmuls ({flags}); use --precision fp32"
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
        inference_precision: OpenVINO's name of the type of matmuls in floats, `f32` or `bf16`; `f32` replaces it on a
            processor without native bfloat16.
    """
    settings: dict[str, Any] = {
        "runtime": f"openvino {openvino.__version__.partition('-')[0]}",
        "provider": DEVICE,
        "intra_op_threads": threads or usable_cores(),
        # OpenVINO computes in bfloat16 by default on processors that have it.
        "inference_precision": inference_precision if native_bfloat16() else "f32",
        "performance_hint": "LATENCY",
        # Engines with fewer threads than cores may run at the same time, and would be pinned to the same cores.
        "cpu_pinning": threads is None or threads >= usable_cores(),
    }
    if shapes := list(shapes):
        settings["shapes"] = [f"{batch}x{seq}" for batch, seq in shapes]
    return settings


def read_model(path: Path, core: openvino.Core = _CORE) -> openvino.Model:
    """A graph in ONNX or in OpenVINO's format.

    Args:
        core: reads it, with extensions where it has any.

    Raises:
        InputError: OpenVINO cannot read it; the message names the operator where there is one.
    """
    try:
        return core.read_model(path)
    except Exception as error:  # OpenVINO raises RuntimeError and others
        if operators := ", ".join(_UNCONVERTED.findall(str(error))):
            text = (
                f"OpenVINO cannot convert {operators} as the graph uses it; use --target ort, or a file of ONNX's own"
                " operators, such as torch.onnx.export writes"
            )
            raise InputError(
                text, code=ErrorCode.UNSUPPORTED_MODEL, path=path, runtime="openvino", operators=operators
            ) from error
        text = f"{path}: OpenVINO cannot read it ({failure_reason(error)}); use --target ort, or build it again"
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED, path=path, runtime="openvino") from error


def compile_model(
    model: openvino.Model, path: Path, settings: Mapping[str, Any], cache: Path | None = None
) -> openvino.CompiledModel:
    """Compile a graph for this processor.

    Args:
        cache: folder of compiled models, read and written; None: there is no cache.

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
        text = f"{path}: OpenVINO cannot compile it ({failure_reason(error)}); use --target ort"
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED, path=path, runtime="openvino") from error


def run_graph(graph: CompiledGraph, feeds: Feeds) -> dict[str, np.ndarray]:
    """Outputs by name. Feeds that the graph has no input for are ignored.

    Raises:
        InputError: an input is missing, or the graph cannot be compiled, or cannot run on these inputs.
    """
    try:
        return graph.run(feeds)
    except KeyError as error:
        raise missing_input(error.args[0], graph.inputs) from error
    except InputError:
        raise
    except Exception as error:  # OpenVINO raises RuntimeError and others
        text = (
            f"OpenVINO cannot run the graph on these inputs ({failure_reason(error)}); pass arrays of its inputs'"
            " shapes, and texts no longer than the model's positions"
        )
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED) from error


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

    Rows that a table lacks become NaN, see `_mark_missing_rows`.

    Args:
        out: the file to write, `.xml`; the weights go beside it.
        info: facts to store in the graph, in JSON; `stored_info` returns them.
    """
    _mark_missing_rows(model)
    model.set_rt_info(json.dumps(info), _INFO)
    openvino.save_model(model, out, compress_to_fp16=False)


def _mark_missing_rows(model: openvino.Model) -> None:
    """Let rows that a table lacks be NaN: those of positions, or of tokens, beyond its last.

    OpenVINO reads zeros there, where ONNX Runtime fails.
    """
    for node in model.get_ops():
        if node.get_type_name() != "Gather":
            continue
        table, indices, axis = (node.input_value(number) for number in range(3))
        is_table = table.get_partial_shape().rank == 2 and table.get_partial_shape()[0].is_static
        is_real = table.get_element_type().is_real()
        if not (is_table and is_real) or _is_constant(indices) or not _is_constant(axis) or axis.get_node().data.any():
            continue
        readers = node.output(0).get_target_inputs()
        last = ops.constant(table.get_partial_shape()[0].get_length() - 1, indices.get_element_type())
        is_row = ops.unsqueeze(ops.less_equal(indices, last), ops.constant(-1))
        marked = ops.select(is_row, node, ops.constant(np.nan, node.get_element_type()))
        for reader in readers:
            reader.replace_source_output(marked.output(0))


def _is_constant(value: openvino.Output) -> bool:
    return bool(value.get_node().get_type_name() == "Constant")


def stored_info(model: openvino.Model) -> dict[str, Any]:
    """The facts that `write_model` stored in a graph; empty for a graph of another origin."""
    if not model.has_rt_info(_INFO):
        return {}
    return json.loads(str(model.get_rt_info(_INFO).value))


def tensor_names(model: openvino.Model) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the inputs and of the outputs, in order, as `write_model` stored them, else as OpenVINO has them."""
    info = stored_info(model)
    inputs, outputs = (
        tuple(info.get(name, [tensor.any_name for tensor in tensors]))
        for name, tensors in (("inputs", model.inputs), ("outputs", model.outputs))
    )
    return inputs, outputs


@dataclass(frozen=True)
class FixedRequest:
    """A graph compiled for one shape.

    Attributes:
        compiled: the graph as OpenVINO compiled it.
        request: runs it.
        cost: time of compiling it, or of reading it from the cache, and the memory by which that grew the process.
    """

    compiled: openvino.CompiledModel
    request: EngineRequest
    cost: str


def compile_fixed(
    model: openvino.Model,
    shapes: Iterable[Shape],
    path: Path,
    settings: Mapping[str, Any],
    cache: Path | None = None,
) -> dict[Shape, FixedRequest]:
    """Compile a graph for fixed shapes.

    Args:
        model: the graph, with free axes; it stays unchanged.
        cache: folder of compiled models; None: there is no cache.

    Raises:
        InputError: the graph cannot have one of the shapes.
    """
    requests = {}
    axes, (inputs, _) = stored_info(model).get("input_axes", {}), tensor_names(model)
    for shape in shapes:
        before, start = resident_bytes(), time.perf_counter()
        try:
            fixed = at_shape(model, inputs, axes, shape)
        except Exception as error:  # OpenVINO raises RuntimeError and others
            text = (
                f"the graph cannot have the shape {shape[0]}x{shape[1]} ({failure_reason(error)}); use shorter --shapes"
            )
            raise InputError.of_file(path, text, ErrorCode.OUT_OF_RANGE, shape=shape) from error
        compiled = compile_model(fixed, path, settings, cache)
        request = EngineRequest(compiled.create_infer_request())
        after = resident_bytes()
        memory = "" if before is None or after is None else f", {max(0, after - before) / 1e6:.0f} MB"
        requests[shape] = FixedRequest(compiled, request, f"{time.perf_counter() - start:.1f} s{memory}")
    return requests


def open_graph(
    model: openvino.Model, free: Callable[[], EngineRequest], fixed: Mapping[Shape, FixedRequest] | None = None
) -> CompiledGraph:
    """A graph that requests run: `free` returns that for free axes, and `fixed` are those of `compile_fixed`."""
    requests = {shape: compiled.request for shape, compiled in (fixed or {}).items()}
    return CompiledGraph(*tensor_names(model), stored_info(model), free, requests)


def runner(path: Path, settings: Mapping[str, Any]) -> Callable[[Feeds], dict[str, np.ndarray]]:
    """Load a graph with all of its fixed shapes, and return a function that runs it."""
    model = read_model(path)
    request = EngineRequest(compile_model(model, path, settings).create_infer_request())
    fixed = compile_fixed(model, map(parse_shape, settings.get("shapes", ())), path, settings)
    return functools.partial(run_graph, open_graph(model, lambda: request, fixed))


@contextlib.contextmanager
def locked_folder(path: Path, settings: Mapping[str, Any]) -> Iterator[Path | None]:
    """The cache folder of an engine, locked against other processes that load it.

    Args:
        path: the engine, `.xml`.

    Yields:
        The folder; None where the user's cache cannot be written.
    """
    with contextlib.ExitStack() as stack:
        folder = user_cache() / "openvino" / _digest(path, settings)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)  # by which the engines used longest ago are removed
            with tempfile.TemporaryFile(dir=folder):  # raises unless the folder can be written
                pass
            stack.enter_context(file_lock(folder))
        except OSError as error:
            logger.debug("%s: compiled models are not cached (%s)", folder, error)
            yield None
            return
        yield folder
    evict_oldest(folder.parent)


def compile_cached(
    model: openvino.Model, path: Path, settings: Mapping[str, Any], folder: Path | None
) -> tuple[openvino.CompiledModel, tuple[Layer, ...]]:
    """Compile a graph, or read it from the cache, with the layers that OpenVINO executes.

    Args:
        folder: the cache folder of the engine; None: compile without a cache.

    Raises:
        InputError: OpenVINO cannot compile the graph.
    """
    compiled = compile_model(model, path, settings, folder)
    if folder is None:
        return compiled, tuple(executed_layers(compiled))
    is_cached = compiled.get_property("LOADED_FROM_CACHE")
    layers = read_layers(folder) if is_cached else None
    if layers is None:
        first = compile_model(model, path, settings) if is_cached else compiled
        layers = tuple(executed_layers(first))
        write_layers(folder, layers)
    return compiled, layers


def _digest(path: Path, settings: Mapping[str, Any]) -> str:
    """Digest of everything but the weights that a compiled model depends on; OpenVINO compares the weights."""
    machine = {"processor": processor(), "instructions": [*int8_instructions(), *bfloat16_instructions()]}
    facts = json.dumps({**machine, **settings}, sort_keys=True)
    return hashlib.sha256(path.read_bytes() + facts.encode()).hexdigest()[:32]


def read_layers(folder: Path) -> tuple[Layer, ...] | None:
    """The stored layers of an engine; None where there are none."""
    try:
        stored = json.loads((folder / _LAYERS).read_text(encoding="utf-8"))
        return tuple(Layer(row["kind"], row["precision"], frozenset(row["nodes"])) for row in stored)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_layers(folder: Path, layers: Iterable[Layer]) -> None:
    """Store the layers of an engine."""
    write_json(folder / _LAYERS, [{**dataclasses.asdict(layer), "nodes": sorted(layer.nodes)} for layer in layers])


def evict_oldest(cache: Path, *, engines: int = _MAX_ENGINES, total: int = _MAX_BYTES) -> None:
    """Remove the engines that were used longest ago, and compiled models of older weights, beyond limits.

    Args:
        cache: folder with one folder for each engine.
        engines: maximum number of engines.
        total: maximum number of bytes.
    """
    with contextlib.suppress(OSError):  # another process may remove the same folders
        folders = sorted(cache.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        size = 0
        for folder in folders[engines:]:
            shutil.rmtree(folder)
        for number, folder in enumerate(folders[:engines]):
            # OpenVINO leaves a file for each set of weights that an engine had.
            files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
            for age, file in enumerate(files):
                size += file.stat().st_size
                if size > total and (number or age):
                    file.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
