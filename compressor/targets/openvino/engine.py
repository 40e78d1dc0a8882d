"""Engines of OpenVINO: convert a graph, compile it, and count its fused attentions.

An engine that is compiled for fixed shapes pads smaller batches with zeros, and cuts its outputs. Only a graph with an
attention mask, whose ids are only looked up in tables, is padded: the mask hides the padding. Any other graph, such as
one that searches for the padding token, runs at a fixed shape only if its inputs have that shape. A graph that reads
padding in another way, such as the last token of every row, computes something else; the proofs of a run, which pad
inputs, detect it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.errors import ErrorCode, InputError
from compressor.results import QuantizedProducts
from compressor.targets.base import BuildOptions, Engine, Feeds, Precision, Provider, Shape, check_reach
from compressor.targets.graph_facts import (
    fusible_attentions,
    is_quantized,
    matmul_names,
    read_float_widths,
    weight_matmuls,
)
from compressor.targets.openvino import session as sessions
from compressor.targets.openvino.batches import Axes, CompiledGraph, EngineRequest
from compressor.targets.openvino.session import Layer, read_model
from compressor.targets.peak_memory import peak_growth
from compressor.targets.tensor_specs import FREE, TensorSpec
from graph_passes import load, save
from graph_passes.block_sparse.masks import REACH
from graph_passes.passes import TransposeSingleQuery

if TYPE_CHECKING:
    import openvino

_FUSED_KINDS = frozenset(("MHA", "ScaledDotProductAttention", "Subgraph"))
"""Kinds of layers that compute a whole attention if they execute its second matmul."""
_MATMULS = frozenset(("FullyConnected", "MatMul"))
"""Kinds of layers that compute one matmul."""
_COMBINED_MATMULS = {"QKVProjection": 3, "LLMMLP": 3}
"""Kinds of layers that compute several matmuls with weights, and how many."""
_PRECISIONS: Mapping[str, Precision] = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "i8": "int8", "u8": "int8"}
"""OpenVINO's name of a precision -> its name in this project."""
_MOST_BYTES = 2**27
"""Largest size of the weights of a graph that has fixed shapes without a request for them."""
_REPORTED = ("FullyConnected", "MatMul", "Softmax", "MVN", "RMS", "Transpose", "Reorder", "Subgraph")
"""Kinds of layers that `optimization` counts."""


@dataclass(kw_only=True, eq=False)
class OpenVinoEngine(Engine):
    """A graph compiled by OpenVINO. Only one thread at a time may run it: a request holds the outputs of its last run.

    `products` is empty for an engine of an earlier version, whose file does not store the number of matmuls.

    Attributes:
        layers: the layers that OpenVINO executes.
    """

    layers: tuple[Layer, ...] = field(repr=False)
    _graph: CompiledGraph = field(repr=False)

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name; see `Engine.run`."""
        check_reach(self.reach, feeds)
        return sessions.run_graph(self._graph, feeds)

    def memory(self, feeds: Feeds) -> int | None:
        """Bytes that loading and running the graph takes at the peak; see `Engine.memory`."""
        return peak_growth(sessions.__name__, self.path, self.session, feeds)


def build_engine(
    onnx: Path,
    out: Path,
    *,
    precision: Precision = "fp32",
    provider: Provider | None = None,
    threads: int | None = None,
    options: BuildOptions | None = None,
) -> OpenVinoEngine:
    """Convert a graph into OpenVINO's format, write it with its weights (`.bin`), and compile it; see `Target.build`.

    The graph must be quantized for `int8`. In `bf16` matmuls are computed in bfloat16, while the file keeps its weights
    in float32.

    Raises:
        InputError: OpenVINO cannot read or compile the graph, it is not quantized, or it cannot have a fixed shape.
    """
    options, source = options or BuildOptions(), load(onnx)
    shapes = options.shapes
    if not options.requires_shapes and (_weight_bytes(source) > _MOST_BYTES or unfixable(*_axes(source))):
        shapes = ()
    in_int8, in_float = matmul_names(source)
    if precision == "int8" and not in_int8:
        text = (
            f"{onnx}: has no quantized matmuls, and OpenVINO runs in int8 only matmuls that the graph quantizes; use"
            " model.int8.onnx of a run with --precision int8, or --precision fp32"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED, path=onnx)
    info = _facts(source, shapes)
    if shapes and (reason := unfixable(info["input_axes"], info["output_axes"])):
        text = f"{onnx}: cannot be compiled for fixed shapes ({reason}); omit --shapes"
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=onnx)
    if in_int8:
        info |= {"int8_products": in_int8, "float_matmuls": in_float, "float_widths": read_float_widths(source)}
    if "bf16" in (precision, options.float_precision):
        # Other programs and other machines that load the engine read the precision that it was measured in.
        info |= {"inference_precision": "bf16", "native_instructions": sessions.OPENVINO_BFLOAT16}
    with tempfile.TemporaryDirectory(prefix=".openvino-", dir=out.parent) as folder:
        # An earlier engine is kept if this graph cannot be compiled.
        written = Path(folder) / out.name
        sessions.write_model(convert(onnx), written, info)
        # The facts of a build are measured without the cache.
        engine = _open(written, threads, out, free_axes=options.free_axes or not shapes)
        for path in (written.with_suffix(".bin"), written):
            path.replace(out.with_suffix(path.suffix))
    return engine


def _weight_bytes(source: ir.Model) -> int:
    return sum(
        value.const_value.nbytes for value in source.graph.initializers.values() if value.const_value is not None
    )


def _axes(source: ir.Model) -> tuple[Axes, Axes]:
    inputs = [value for value in source.graph.inputs if not value.is_initializer()]
    of_inputs, of_outputs = (
        {str(value.name): axis_names(value) for value in values} for values in (inputs, source.graph.outputs)
    )
    return of_inputs, of_outputs


def _facts(source: ir.Model, shapes: Sequence[Shape]) -> dict[str, Any]:
    """The facts about its graph that are stored in an engine."""
    input_axes, output_axes = _axes(source)
    return {
        "inputs": list(input_axes),
        "outputs": list(output_axes),
        "products": [_name(site.output.producer()) for site in fusible_attentions(source)],
        "weighted_products": len(weight_matmuls(source)),
        "reach": json.loads(source.metadata_props.get(REACH, "{}")),
        "input_axes": input_axes,
        "output_axes": output_axes,
        "shapes": [list(shape) for shape in shapes],
        "pads": can_pad(source),
    }


def load_engine(
    path: Path,
    *,
    provider: Provider | None = None,
    threads: int | None = None,
    kernel: Path | None = None,
    cached: bool = True,
) -> OpenVinoEngine:
    """Compile a graph that `build_engine` wrote, or read it from the cache of compiled models; see `Target.load`.

    Raises:
        InputError: a file is missing, or OpenVINO cannot read or compile the graph.
    """
    for file in (path, path.with_suffix(".bin")):
        if not file.is_file():
            text = f"{file}: no such engine; build it with compress build --target openvino"
            raise InputError(text, code=ErrorCode.FILE_MISSING, path=file)
    return _open(path, threads, path, cached=cached)


def _open(
    path: Path, threads: int | None, shown: Path, *, cached: bool = False, free_axes: bool = True
) -> OpenVinoEngine:
    """The engine in `path`; messages name the file `shown`.

    Without `free_axes` the graph is compiled for free axes when a batch needs it, and the layers are those of the first
    fixed shape.
    """
    model = read_model(path)
    info = sessions.stored_info(model)
    shapes = [(batch, seq) for batch, seq in info.get("shapes", ())]
    settings = sessions.session_settings(threads, shapes, info.get("inference_precision", "f32"))
    products = info.get("products", [])
    with sessions.locked_folder(path, settings) if cached else contextlib.nullcontext() as folder:
        free = sessions.compile_cached(model, shown, settings, folder) if free_axes else None
        fixed = sessions.compile_fixed(model, shapes, shown, settings, folder)

    @functools.cache
    def request() -> EngineRequest:
        compiled = sessions.compile_model(model, shown, settings) if free is None else free[0]
        return EngineRequest(compiled.create_infer_request())

    if free is not None:
        request()
    layers = tuple(sessions.executed_layers(fixed[shapes[0]].compiled)) if free is None else free[1]
    graph = sessions.open_graph(model, request, fixed)
    kernels = collections.Counter(layer.kind for layer in layers)
    counts = [f"{kernels[kind]} {kind}" for kind in _REPORTED if kind in kernels]
    of_shapes = [f"{batch}x{seq} ({compiled.cost})" for (batch, seq), compiled in fixed.items()]
    also = f" for free axes and {', '.join(of_shapes)}" if of_shapes else ""
    fused = frozenset().union(*(layer.nodes for layer in layers if layer.kind in _FUSED_KINDS))
    return OpenVinoEngine(
        path=shown,
        specs=tuple(map(_spec, graph.inputs, model.inputs)),
        outputs=graph.outputs,
        precision="int8" if "int8_products" in info else _PRECISIONS[settings["inference_precision"]],
        attentions=len(products),
        fused=sum(product in fused for product in products),
        kernels=kernels,
        optimization=f"compiled by OpenVINO{also}; runs {', '.join(counts)}",
        session=settings,
        host=f"{settings['runtime']} on {settings['provider']}, {settings['intra_op_threads']} threads",
        quantized=_quantized(info, layers) if "int8_products" in info else None,
        products=_executed(info.get("weighted_products", 0), layers),
        reach=info.get("reach", {}),
        layers=layers,
        _graph=graph,
    )


def _quantized(info: Mapping[str, Any], layers: Iterable[Layer]) -> QuantizedProducts:
    requested, in_int8, names = info["int8_products"], 0, set[str]()
    for layer in (layer for layer in layers if layer.kind in _MATMULS):
        if _PRECISIONS.get(layer.precision) == "int8":
            in_int8 += 1
        else:
            names |= layer.nodes
    in_float = tuple(name for name in requested if name in names)
    return QuantizedProducts(
        requested=len(requested),
        # OpenVINO drops some names when it merges nodes, so layers are counted instead of names.
        executed=min(len(requested) - len(in_float), in_int8),
        in_float=in_float,
        float_in_graph=tuple(info["float_matmuls"]),
        float_widths=tuple((inputs, outputs) for inputs, outputs in info.get("float_widths", ())),
    )


def _executed(requested: int, layers: Iterable[Layer]) -> dict[str, int]:
    """Number of the `requested` matmuls with constant weights by precision; empty where the graph has none.

    OpenVINO does not report the nodes of all layers, so matmuls that no layer reports count as computed in fp32.
    """
    counts: collections.Counter[str] = collections.Counter()
    for layer in layers:
        # `MatMul` multiplies activations, `FullyConnected` weights.
        matmuls = _COMBINED_MATMULS.get(layer.kind, int(layer.kind == "FullyConnected"))
        counts[_PRECISIONS.get(layer.precision, "fp32")] += matmuls
    executed: dict[str, int] = {}
    for name, count in counts.most_common():
        if name != "fp32" and count:
            executed[name] = min(count, requested - sum(executed.values()))
    return {**executed, "fp32": requested - sum(executed.values())} if requested else {}


def _name(node: ir.Node | None) -> str:
    return (node.name if node is not None else None) or ""


def _spec(name: str, tensor: Any) -> TensorSpec:
    dims = (FREE if size.is_dynamic else size.get_length() for size in tensor.partial_shape)
    return TensorSpec(name, ir.DataType.from_numpy(tensor.element_type.to_dtype()), tuple(dims))


def can_pad(model: ir.Model) -> bool:
    """Whether batches may be padded with zeros: the graph has a mask, and its ids are only looked up in tables."""
    inputs = {str(value.name): value for value in model.graph.inputs if not value.is_initializer()}
    is_masked = any(name.endswith("attention_mask") for name in inputs)
    return is_masked and all(_is_looked_up(value) for name, value in inputs.items() if name.endswith("input_ids"))


def _is_looked_up(value: ir.Value) -> bool:
    """Whether a tensor is read only as the indices of `Gather`, or for its shape."""
    return all(
        (reader.op_type == "Gather" and position == 1)
        or reader.op_type == "Shape"
        or (reader.op_type in ("Cast", "Identity", "Reshape") and position == 0 and _is_looked_up(reader.outputs[0]))
        for reader, position in value.uses()
    )


def axis_names(value: ir.Value) -> tuple[str, ...]:
    """Names of the axes of an input or output of a graph."""
    return tuple(str(size) for size in value.shape or ())


def unfixable(inputs: Axes, outputs: Axes) -> str | None:
    """Why a graph cannot be compiled for fixed shapes, in a few words; None if it can."""
    known = {"batch", "sequence"}
    for tensor, names in (*inputs.items(), *outputs.items()):
        free = [name for name in names if not name.isdecimal() and name not in known]
        if free:
            return f"the axis {free[0]} of {tensor} is neither the batch nor the length of the rows"
    return None


def run_fixed(onnx: Path, feeds: Feeds) -> dict[str, np.ndarray]:
    """Outputs of an ONNX graph that OpenVINO reads without rewrites, compiled for the shapes of a single batch.

    Raises:
        InputError: OpenVINO cannot read the graph, or cannot run it at these shapes.
    """
    model, (inputs, outputs) = read_model(onnx), map(tuple, _axes(load(onnx)))
    try:
        model.reshape({position: list(feeds[name].shape) for position, name in enumerate(inputs)})
    except Exception as error:  # OpenVINO raises RuntimeError and others
        reason = sessions.failure_reason(error)
        text = f"OpenVINO cannot give the graph the shapes of these inputs ({reason}); run it with free axes"
        raise InputError.of_file(onnx, text, ErrorCode.RUNTIME_FAILED) from error
    request = EngineRequest(sessions.compile_model(model, onnx, sessions.session_settings(None)).create_infer_request())
    return sessions.run_graph(CompiledGraph(inputs, outputs, {}, lambda: request), feeds)


def convert(onnx: Path) -> openvino.Model:
    """An ONNX graph in OpenVINO, with inlined functions, since OpenVINO does not inline them.

    In a quantized graph, attentions of one query are rewritten, because OpenVINO computes them wrongly at fixed shapes.

    Raises:
        InputError: OpenVINO cannot read it; the message names the operator where there is one.
    """
    model = load(onnx)
    changed = common.InlinePass()(model).modified
    if is_quantized(model):
        changed = TransposeSingleQuery()(model).modified or changed
    if not changed:
        return read_model(onnx)
    with tempfile.TemporaryDirectory() as folder:
        rewritten = Path(folder) / onnx.name
        save(model, rewritten)
        return read_model(rewritten)
