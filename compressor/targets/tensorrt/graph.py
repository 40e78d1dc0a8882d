"""A graph as TensorRT reads it: everything that is to be computed in lower precision says so in the graph itself.

1. Local functions are inlined: 8.6 reads none.
2. Lower precision: weights and arithmetic in fp16 or bf16, inputs and outputs as they were. A graph with quantization
   (`QuantizeLinear`, int8 or fp8) says what it computes in already, and is left as it is.
3. From 10 on: the scale of scores moves to the queries, where the fusion of attention has to find it (TensorRT's
   documentation, "Fused Attention"). Quantized graphs are left alone: a product next to its scales is what fuses there.
4. For 8.6: 64-bit inputs and outputs become 32-bit, and what operator set 18 writes otherwise is written as in 17.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx.defs
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass, ShapeInferencePass

from compressor.errors import InputError
from compressor.targets.base import BuildOptions, Precision, Span
from compressor.targets.random_inputs import free_axis, memory_beside
from compressor.targets.tensorrt.bindings import Api
from compressor.targets.tensorrt.metadata import Shape
from graph_passes import load, save
from graph_passes.passes import ScaleQueries
from graph_passes.passes.fp16 import halve

_QUANTIZED = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"))
_OLDEST_OPSET = 17
_DEFAULTS: Mapping[str, object] = {"antialias": 0, "keep_aspect_ratio_policy": "stretch"}
"""What set 18 lets `Resize` say, and what it is where nothing is said."""
_TYPED = (("Cast", "to"), ("EyeLike", "dtype"), ("RandomNormalLike", "dtype"))
"""Attributes that name a type."""


def prepare(source: Path, out: Path, precision: Precision, api: Api) -> tuple[str, bool]:
    """Write the graph as TensorRT reads it.

    Returns:
        What was done, in one line, and whether the graph is quantized.

    Raises:
        GraphError: the file cannot be read.
        InputError: it has operators that this TensorRT cannot read.
    """
    model = load(source)
    done = []
    if model.functions:
        done.append(f"{len(model.functions)} local functions inlined")
        InlinePass()(model)
    quantized = is_quantized(model)
    if not api.wide:
        _lower_opset(model, source, api)
    elif not quantized and ScaleQueries()(model).modified:
        done.append("queries scaled in place of scores")
    save(model, out)
    if quantized:
        done.append("quantized as it came")
    elif precision != "fp32":
        weights = {name: value.const_value for name, value in model.graph.initializers.items()}
        halve(out)
        if precision == "bf16":
            _to_bfloat(out, weights)
        done.append(f"converted to {precision}, inputs and outputs left as they were")
    if not api.wide:
        _narrow(out)
        done.append(f"written in operator set {_OLDEST_OPSET} with 32-bit inputs")
    return "; ".join(done) or "the graph as it is", quantized


def is_quantized(model: ir.Model) -> bool:
    """Whether a graph says by `QuantizeLinear` what it computes in."""
    return any(node.op_type in _QUANTIZED for node in model.graph)


def element_types(path: Path) -> dict[str, ir.DataType]:
    """Types of a graph's tensors, by name, as far as they can be told."""
    model = load(path)
    ShapeInferencePass()(model)
    values = [output for node in model.graph.all_nodes() for output in node.outputs]
    return {str(value.name): value.dtype for value in values if value.dtype is not None}


def profile(model: ir.Model, tuning: BuildOptions) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Least, usual and largest shape of every input: axes that the graph fixes stay as they are.

    The first axis is the batch; others are the length, but for those of memories and caches (`free_axis`). Memories may
    be as long as the model keeps them.

    Raises:
        InputError: there are key/value caches, or memories, and nothing says how long they are.
    """
    kept = memory_beside(model, 1) or 0
    least, usual, most = tuning.memory
    memory = least, usual or kept, max(most, kept)
    spans = {"batch": tuning.batch, "length": tuning.seq, "memory": memory, "past": tuning.memory}
    found = {}
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        axes = [_axis(value, axis, dim, spans) for axis, dim in enumerate(value.shape or ())]
        smallest, middle, largest = (tuple(span[place] for span in axes) for place in range(3))
        found[str(value.name)] = (smallest, middle, largest)
    return found


def _axis(value: ir.Value, axis: int, dim: int | ir.SymbolicDim, spans: Mapping[str, Span]) -> Span:
    if isinstance(dim, int):
        return dim, dim, dim
    kind = free_axis(value, axis)
    if not spans[kind][-1]:
        raise InputError(
            f"{value.name}: is a {'key/value cache' if kind == 'past' else kind}, and nothing says how long it may be;"
            " export the model without it, or use --target ort"
        )
    return spans[kind]


def _to_bfloat(path: Path, weights: dict[str, ir.TensorProtocol | None]) -> None:
    """Turn a graph in fp16 into one in bf16: the converter has found out what can be in lower precision.

    Weights are rounded from the numbers that they had before, for bfloat16 reaches further than fp16.
    """
    model = load(path)
    for name, value in model.graph.initializers.items():
        if value.dtype == ir.DataType.FLOAT16 and value.const_value is not None:
            given = weights.get(name) or value.const_value
            value.const_value = ir.Tensor(given.numpy().astype(ml_dtypes.bfloat16), name=name)
            value.dtype = ir.DataType.BFLOAT16
    for node in model.graph.all_nodes():
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == ir.DataType.FLOAT16:
                tensor = ir.Tensor(attribute.as_tensor().numpy().astype(ml_dtypes.bfloat16))
                node.attributes[name] = ir.AttrTensor(name, tensor)
            elif (node.op_type, name) in _TYPED and attribute.as_int() == ir.DataType.FLOAT16:
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.BFLOAT16))
        for output in node.outputs:
            if output.dtype == ir.DataType.FLOAT16:
                output.dtype = ir.DataType.BFLOAT16
    save(model, path)


def _narrow(path: Path) -> None:
    """64-bit inputs and outputs become 32-bit, with a cast inside."""
    model = load(path)
    for value in list(model.graph.inputs):
        if value.dtype != ir.DataType.INT64 or value.is_initializer():
            continue
        uses = list(value.uses())
        value.dtype = ir.DataType.INT32
        cast = ir.node("Cast", [value], {"to": int(ir.DataType.INT64)})
        cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.INT64, value.shape
        for node, place in uses:
            node.replace_input_with(place, cast.outputs[0])
        model.graph.insert_before(model.graph[0], cast)
    for place, value in enumerate(list(model.graph.outputs)):
        if value.dtype != ir.DataType.INT64:
            continue
        cast = ir.node("Cast", [value], {"to": int(ir.DataType.INT32)})
        name, value.name = value.name, f"{value.name}_int64"
        cast.outputs[0].name = name
        cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.INT32, value.shape
        model.graph.append(cast)
        model.graph.outputs[place] = cast.outputs[0]
    save(model, path)


def _lower_opset(model: ir.Model, source: Path, api: Api) -> None:
    """Write operator set 18 as 17: axes of reductions are attributes, and an even Split says nothing.

    Raises:
        InputError: an operator says what only set 18 can.
    """
    opset = model.opset_imports.get("", 0)
    if opset <= _OLDEST_OPSET:
        return
    if opset > _OLDEST_OPSET + 1:
        raise InputError(
            f"{source}: is of operator set {opset}, and TensorRT {api.version} reads up to {_OLDEST_OPSET}; export it"
            " with --opset 18, or build with TensorRT 10 or newer"
        )
    ShapeInferencePass()(model)
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum":
            lowered = _lower_reduction(node)
        elif node.op_type == "Split":
            lowered = _lower_split(node)
        else:
            lowered = node.attributes.get_string("reduction", "none") not in ("max", "min")
            for name, default in _DEFAULTS.items():
                if name in node.attributes and node.attributes[name].value == default:
                    node.attributes.pop(name)
        if not (lowered and _is_known(node)):
            raise _unreadable(source, node, api)
    RemoveUnusedNodesPass()(model)
    model.opset_imports[""] = _OLDEST_OPSET


def _lower_reduction(node: ir.Node) -> bool:
    """Axes become an attribute; whether they can."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    constant = ir.convenience.get_const_tensor(given) if given is not None else None
    axes = [] if constant is None else np.atleast_1d(constant.numpy()).tolist()
    nothing = node.attributes.pop("noop_with_empty_axes", None)
    if (given is not None and constant is None) or (not axes and nothing is not None and nothing.as_int()):
        return False
    if axes:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    node.resize_inputs(1)
    return True


def _lower_split(node: ir.Node) -> bool:
    """Parts need not be counted where they are alike; whether they are."""
    parts, given = node.attributes.pop("num_outputs", None), node.inputs[0]
    if parts is None or given is None:
        return True
    size = given.shape[node.attributes.get_int("axis", 0)] if given.shape is not None else None
    return isinstance(size, int) and size % parts.as_int() == 0


def _is_known(node: ir.Node) -> bool:
    """Whether the oldest operator set has an operator, with its attributes and as many inputs."""
    try:
        schema = onnx.defs.get_schema(node.op_type, _OLDEST_OPSET, "")
    except onnx.defs.SchemaError:
        return False
    return len(node.inputs) <= schema.max_input and set(node.attributes) <= set(schema.attributes)


def _unreadable(source: Path, node: ir.Node, api: Api) -> InputError:
    return InputError(
        f"{source}: {node.op_type} ({node.name}) is written as only operator set 18 allows, and TensorRT {api.version}"
        f" reads up to {_OLDEST_OPSET}; build with TensorRT 10 or newer"
    )
