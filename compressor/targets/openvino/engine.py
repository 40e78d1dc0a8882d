"""Engines of OpenVINO: a graph converted, compiled, and its fused attentions counted."""

from __future__ import annotations

import collections
import contextlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError
from compressor.results import QuantizedProducts
from compressor.targets.base import Feeds, Precision
from compressor.targets.graph_facts import fusible_attentions
from compressor.targets.openvino import fixed_shapes, model_cache
from compressor.targets.openvino import session as sessions
from compressor.targets.openvino.batches import Axes, EngineRequest, cut, fitting_shape, pad, sizes_of
from compressor.targets.openvino.conversion import convert
from compressor.targets.openvino.fixed_shapes import FixedRequest
from compressor.targets.openvino.session import DeferredRequest, Layer, Names
from compressor.targets.openvino.shapes import axis_names, can_pad, unfixable
from compressor.targets.options import Shape
from compressor.targets.peak_memory import peak_growth
from compressor.targets.quantized_graph import (
    float_products,
    float_widths_of,
    quantized_products,
    weighted_products,
)
from compressor.targets.reach import check_reach
from compressor.targets.tensor_specs import FREE, TensorSpec
from graph_passes import load
from graph_passes.block_sparse.masks import REACH

_FUSED_KINDS = frozenset(("MHA", "ScaledDotProductAttention", "Subgraph"))
"""Kinds of layers that compute a whole attention if they execute its second product."""
_PRODUCTS = frozenset(("FullyConnected", "MatMul"))
"""Kinds of layers that compute one matrix product."""
_COMBINED_PRODUCTS = {"QKVProjection": 3, "LLMMLP": 3}
"""Kinds of layers that compute several products with weights, and how many."""
_PRECISIONS: Mapping[str, Precision] = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "i8": "int8", "u8": "int8"}
"""OpenVINO's name of a precision -> the name that users know."""
_INT8 = frozenset(("i8", "u8"))
"""OpenVINO's names of the precisions of integer products."""
_REPORTED = ("FullyConnected", "MatMul", "Softmax", "MVN", "RMS", "Transpose", "Reorder", "Subgraph")
"""Kinds of layers that `optimization` counts."""


@dataclass(frozen=True)
class OpenVinoEngine:
    """A graph compiled by OpenVINO; see `Engine` for the other attributes. Only one thread at a time may run it.

    Attributes:
        specs: names, types and shapes of the graph's inputs.
        layers: the layers that OpenVINO executes.
        reach: name of an input -> number of positions that the block masks of the graph cover.
        precision: `fp32` or `bf16`, or `int8` for a quantized graph.
        products: number of matrix products with constant weights that are executed in each precision; empty for an
            engine of an earlier version, which does not say how many its graph has.
    """

    path: Path
    attentions: int
    fused: int
    session: Mapping[str, Any]
    specs: tuple[TensorSpec, ...] = field(repr=False)
    layers: tuple[Layer, ...] = field(repr=False)
    reach: Mapping[str, int]
    _names: Names = field(repr=False)
    _request: EngineRequest | DeferredRequest = field(repr=False)
    _fixed: Mapping[Shape, FixedRequest] = field(repr=False)
    _axes: tuple[Axes, Axes] = field(repr=False)
    _pads: bool = field(repr=False)

    precision: Precision = "fp32"
    quantized: QuantizedProducts | None = None
    products: Mapping[str, int] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs."""
        return self._names.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs."""
        return self._names.outputs

    @property
    def host(self) -> str:
        """Runtime, device and threads."""
        return f"{self.session['runtime']} on {self.session['provider']}, {self.session['intra_op_threads']} threads"

    @property
    def is_reentrant(self) -> bool:
        """False: the engine has one request, which holds the outputs of its last run."""
        return False

    @property
    def kernels(self) -> Mapping[str, int]:
        """Number of executed layers by kind."""
        return collections.Counter(layer.kind for layer in self.layers)

    @property
    def optimization(self) -> str:
        """The layers that OpenVINO executes, in one line."""
        kernels = self.kernels
        counts = [f"{kernels[kind]} {kind}" for kind in _REPORTED if kind in kernels]
        shapes = [f"{batch}x{seq} ({fixed})" for (batch, seq), fixed in self._fixed.items()]
        fixed = f" for free axes and {', '.join(shapes)}" if shapes else ""
        return f"compiled by OpenVINO{fixed}; runs {', '.join(counts)}"

    @property
    def built(self) -> None:
        """None: OpenVINO compiles the graph when it is loaded."""
        return None

    @property
    def device_seconds(self) -> None:
        """None: OpenVINO does not report it."""
        return None

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name; see `Engine.run`.

        Raises:
            InputError: an input is missing or longer than the block masks, or the graph cannot run on these inputs.
        """
        check_reach(self.reach, feeds)
        inputs, outputs = self._axes
        shape = fitting_shape(self._fixed, inputs, feeds, pads=self._pads) if self._fixed else None
        if shape is None:
            return sessions.run_request(self._request, self._names, feeds)
        padded = sessions.run_request(self._fixed[shape].request, self._names, pad(inputs, feeds, shape))
        return cut(outputs, padded, sizes_of(inputs, feeds))

    def memory(self, feeds: Feeds) -> int | None:
        """Bytes that loading and running the graph takes at the peak; see `Engine.memory`."""
        return peak_growth(fixed_shapes.__name__, self.path, self.session, feeds)


def build_engine(
    onnx: Path,
    out: Path,
    *,
    precision: Precision = "fp32",
    threads: int | None = None,
    shapes: Sequence[Shape] = (),
    free_axes: bool = True,
    float_precision: Precision = "fp32",
) -> OpenVinoEngine:
    """Convert a graph into OpenVINO's format, write it with its weights (`.bin`), and compile it.

    Args:
        onnx: the graph, quantized or not.
        out: the file to write, `.xml`.
        precision: `int8` if the graph has to be quantized; `bf16`: products are computed in bfloat16, while the file
            keeps its weights in float32.
        threads: threads per call; None: one per core.
        shapes: fixed shapes that the graph is compiled for too.
        free_axes: whether it is compiled for free axes now; False: when a batch has none of the shapes.
        float_precision: precision of what an int8 engine computes in floats: `fp32` or `bf16`.

    Raises:
        InputError: OpenVINO cannot read or compile the graph, it is not quantized, or it cannot have a fixed shape.
    """
    source = load(onnx)
    in_int8, in_float = ([node.name for node in products(source)] for products in (quantized_products, float_products))
    if precision == "int8" and not in_int8:
        raise InputError(
            f"{onnx}: its products are not quantized, and OpenVINO executes in int8 only what the graph quantizes; use"
            " model.int8.onnx of a run with --precision int8, or --precision fp32",
            code=ErrorCode.UNSUPPORTED,
            path=onnx,
        )
    info = _facts(source, shapes)
    if shapes and (reason := unfixable(info["input_axes"], info["output_axes"])):
        raise InputError(
            f"{onnx}: it cannot be compiled for fixed shapes, {reason}; omit --shapes",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=onnx,
        )
    if in_int8:
        info |= {"int8_products": in_int8, "float_products": in_float, "float_widths": float_widths_of(source)}
    if "bf16" in (precision, float_precision):
        # Other programs that load the engine, and machines without the instructions, read what it was measured with.
        info |= {"inference_precision": "bf16", "native_instructions": sessions.OPENVINO_BFLOAT16}
    with tempfile.TemporaryDirectory(prefix=".openvino-", dir=out.parent) as folder:
        # An engine that was there before stays if this graph cannot be compiled.
        written = Path(folder) / out.name
        sessions.write_model(convert(onnx), written, info)
        # What is reported of a build is measured without the cache.
        engine = _open(written, threads, out, free_axes=free_axes or not shapes)
        for path in (written.with_suffix(".bin"), written):
            path.replace(out.with_suffix(path.suffix))
    return engine


def _facts(source: ir.Model, shapes: Sequence[Shape]) -> dict[str, Any]:
    """What an engine needs to know of its graph, which is stored with it."""
    inputs = [value for value in source.graph.inputs if not value.is_initializer()]
    input_axes, output_axes = (
        {str(value.name): axis_names(value) for value in values} for values in (inputs, source.graph.outputs)
    )
    return {
        "inputs": [value.name for value in inputs],
        "outputs": [value.name for value in source.graph.outputs],
        "products": [_name(site.output.producer()) for site in fusible_attentions(source)],
        "weighted_products": len(weighted_products(source)),
        "reach": json.loads(source.metadata_props.get(REACH, "{}")),
        "input_axes": input_axes,
        "output_axes": output_axes,
        "shapes": [list(shape) for shape in shapes],
        "pads": can_pad(source),
    }


def load_engine(path: Path, *, threads: int | None = None, cached: bool = True) -> OpenVinoEngine:
    """Compile a graph that `build_engine` wrote, or read it from the cache of compiled models.

    Args:
        path: the graph, `.xml`; its weights lie beside it.
        threads: threads per call; None: one per core.
        cached: whether the cache is read and written.

    Raises:
        InputError: a file is missing, or OpenVINO cannot read or compile the graph.
    """
    for file in (path, path.with_suffix(".bin")):
        if not file.is_file():
            raise InputError(
                f"{file}: no such engine; build it with compress build --target openvino",
                code=ErrorCode.FILE_MISSING,
                path=file,
            )
    return _open(path, threads, path, cached=cached)


def _open(
    path: Path, threads: int | None, shown: Path, *, cached: bool = False, free_axes: bool = True
) -> OpenVinoEngine:
    """The engine in `path`; messages name the file `shown`. The cache of compiled models is used on request.

    Without `free_axes` the graph is compiled for them when a batch needs it; the layers are those of the first shape.
    """
    model = sessions.read_model(path)
    info = sessions.stored_info(model)
    shapes = [(batch, seq) for batch, seq in info.get("shapes", ())]
    settings = sessions.session_settings(threads, shapes, info.get("inference_precision", "f32"))
    products = info.get("products", [])
    with model_cache.locked_folder(path, settings) if cached else contextlib.nullcontext() as folder:
        free = model_cache.compile_model(model, shown, settings, folder) if free_axes else None
        fixed = fixed_shapes.compile_fixed(model, shapes, shown, settings, folder)
    request: EngineRequest | DeferredRequest
    if free is None:
        request, layers = DeferredRequest(model, shown, settings), fixed[shapes[0]].layers
    else:
        request, layers = EngineRequest(free[0].create_infer_request()), free[1]
    names = sessions.tensor_names(model)
    fused = frozenset().union(*(layer.nodes for layer in layers if layer.kind in _FUSED_KINDS))
    in_floats = _PRECISIONS[settings["inference_precision"]]
    return OpenVinoEngine(
        path=shown,
        attentions=len(products),
        fused=sum(product in fused for product in products),
        session=settings,
        specs=tuple(map(_spec, names.inputs, model.inputs)),
        layers=layers,
        reach=info.get("reach", {}),
        precision="int8" if "int8_products" in info else in_floats,
        quantized=_quantized(info, layers) if "int8_products" in info else None,
        products=_executed(info.get("weighted_products", 0), layers),
        _names=names,
        _request=request,
        _fixed=fixed,
        _axes=(info.get("input_axes", {}), info.get("output_axes", {})),
        _pads=info.get("pads", False),
    )


def _quantized(info: Mapping[str, Any], layers: Iterable[Layer]) -> QuantizedProducts:
    """The products with constant weights that OpenVINO executes in int8."""
    requested = info["int8_products"]
    products = [layer for layer in layers if layer.kind in _PRODUCTS]
    floats = frozenset().union(*(layer.nodes for layer in products if layer.precision not in _INT8))
    in_float = tuple(name for name in requested if name in floats)
    return QuantizedProducts(
        requested=len(requested),
        # OpenVINO drops some names when it merges nodes, so layers are counted instead of names.
        executed=min(len(requested) - len(in_float), sum(layer.precision in _INT8 for layer in products)),
        in_float=in_float,
        float_in_graph=tuple(info["float_products"]),
        float_widths=tuple((inputs, outputs) for inputs, outputs in info.get("float_widths", ())),
    )


def _executed(requested: int, layers: Iterable[Layer]) -> dict[str, int]:
    """Number of products with constant weights by precision; empty where the graph has none.

    Args:
        requested: the number that the graph has. OpenVINO does not report which nodes all layers execute, so the rest
            of them counts as computed in fp32.
        layers: the layers that OpenVINO executes.
    """
    counts: collections.Counter[str] = collections.Counter()
    for layer in layers:
        # `MatMul` multiplies activations, `FullyConnected` weights.
        products = _COMBINED_PRODUCTS.get(layer.kind, int(layer.kind == "FullyConnected"))
        counts[_PRECISIONS.get(layer.precision, "fp32")] += products
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
