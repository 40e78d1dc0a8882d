"""Infer shapes, types and small contents of one node's outputs from those of its inputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx.checker
import onnx.reference
import onnx_ir as ir

from graph_passes.flow.foreign_shapes import OLD_COMPARES, Shape, foreign_shape
from graph_passes.flow.windows import leaves_nothing

# Operators with which exporters compute shapes; outputs of other operators are not evaluated.
_SHAPE_ARITHMETIC = frozenset(
    "Add And Cast CastLike Concat Constant ConstantOfShape Div Equal Expand Floor Gather Identity Less Max Min Mod Mul "
    "Neg Not Or Range ReduceProd ReduceSum Reshape Sign Slice Split Sqrt Squeeze Sub Transpose Unsqueeze Where".split()
)

LARGEST_CONSTANT = 4096
"""Maximum number of elements of a tensor whose content is evaluated."""

# Since this opset, every operator of `_SHAPE_ARITHMETIC` reads its axes from an input.
_AXES_ARE_INPUTS = 18

# Exceptions of ONNX's inference for operators or types that it does not support.
_UNKNOWN = (
    onnx.defs.SchemaError,
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
)

Inferred = tuple[ir.Value, Shape | None, ir.DataType | None]
"""A tensor, its shape and its type; None where they are unknown."""


def infer(
    node: ir.Node,
    model: ir.Model,
    shapes: dict[ir.Value, Shape],
    types: dict[ir.Value, onnx.TypeProto],
    constants: dict[ir.Value, np.ndarray],
) -> Iterator[Inferred]:
    """Shape and type of each output of a node, as far as its inputs determine them.

    Args:
        node: the node.
        model: the model of the node, for its operator sets.
        shapes: known shapes of the tensors before the node.
        types: known types and shapes of these tensors, as ONNX reads them.
        constants: known contents of small tensors.
    """
    shape = foreign_shape(node, shapes)
    if shape is not None:
        yield from _infer_foreign(node, shape, types)
        return
    inferred = _infer_standard(node, model, types, constants) if _is_safe(node, shapes) else {}
    for value in node.outputs:
        proto = inferred.get(value.name or "")
        if proto is None or not proto.HasField("tensor_type"):
            yield value, None, None
            continue
        dims = proto.tensor_type.shape.dim
        is_known = proto.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims)
        shape = tuple(dim.dim_value for dim in dims) if is_known else None
        shape = None if shape is not None and min(shape, default=0) < 0 else shape
        yield value, shape, ir.DataType(proto.tensor_type.elem_type)


def _is_safe(node: ir.Node, shapes: dict[ir.Value, Shape]) -> bool:
    """Whether ONNX's inference can read a node without an assertion that would end the process.

    It clamps the ends of a `Slice` to the sizes of its input, which fails where nothing is left of an axis. Negative
    sizes, which it infers for a window larger than its input, do not get this far.
    """
    if leaves_nothing(node, shapes):
        return False
    source = node.inputs[0] if node.inputs else None
    return not (node.op_type == "Slice" and source in shapes and 0 in shapes[source])


def _infer_foreign(node: ir.Node, shape: Shape, types: dict[ir.Value, onnx.TypeProto]) -> Iterator[Inferred]:
    """Shapes and types of the outputs of a foreign operator, from the shape of its first output."""
    # The first inputs of an embedding are ids; its data come third.
    data = node.inputs[2 if node.op_type == "EmbedLayerNormalization" else 0]
    element = types[data].tensor_type.elem_type if data in types else 0
    element = ir.DataType.BOOL.value if node.op_type in OLD_COMPARES else element
    dtype = ir.DataType(element) if element else None
    yield node.outputs[0], shape, dtype
    for position, value in enumerate(node.outputs[1:], 1):
        # The fourth output is the sum that is normalized, which the next residual adds to.
        is_sum = position == 3 and node.op_type.startswith("Skip")
        yield value, shape if is_sum else None, dtype if is_sum else None


def _infer_standard(
    node: ir.Node,
    model: ir.Model,
    types: dict[ir.Value, onnx.TypeProto],
    constants: dict[ir.Value, np.ndarray],
) -> dict[str, onnx.TypeProto]:
    """Output name -> type, by ONNX's own inference, from known types and contents; empty where it fails."""
    inputs = {value.name: value for value in node.inputs if value is not None and value.name}
    contents = {name: constants[value] for name, value in inputs.items() if value in constants}
    try:
        return onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, _opset(node, model), node.domain),
            ir.serde.serialize_node(node),
            {name: types[value] for name, value in inputs.items() if value in types},
            {name: onnx.numpy_helper.from_array(content, name) for name, content in contents.items()},
            opset_imports=[onnx.helper.make_opsetid(domain, v) for domain, v in model.graph.opset_imports.items()],
            ir_version=model.ir_version,
        )
    except _UNKNOWN:
        return {}  # The shapes that the file records are used instead.


def _opset(node: ir.Node, model: ir.Model) -> int:
    return node.version or model.graph.opset_imports.get(node.domain, 1)


def evaluate(
    node: ir.Node, model: ir.Model, shapes: dict[ir.Value, Shape], constants: dict[ir.Value, np.ndarray]
) -> None:
    """Add the content of a node's small outputs to `constants` if the content of its inputs is known.

    Args:
        node: the node.
        model: the model of the node, for its operator sets.
        shapes: known shapes of the tensors up to the node's outputs.
        constants: known contents of small tensors.
    """
    if node.domain not in ("", "ai.onnx"):
        return
    if node.op_type in ("Shape", "Size"):
        shape = shapes.get(node.inputs[0]) if node.inputs[0] is not None else None
        if shape is not None:
            start, end = (node.attributes.get(name) for name in ("start", "end"))
            selected = shape[slice(start.as_int() if start else None, end.as_int() if end else None)]
            content = np.array(selected if node.op_type == "Shape" else np.prod(shape), dtype=np.int64)
            constants[node.outputs[0]] = content
            shapes.setdefault(node.outputs[0], content.shape)
        return
    if node.op_type not in _SHAPE_ARITHMETIC or any(v is not None and v not in constants for v in node.inputs):
        return
    outputs = [shapes.get(value) for value in node.outputs]
    if any(shape is None or np.prod(shape, dtype=np.int64) > LARGEST_CONSTANT for shape in outputs):
        return
    feeds = {value.name or "": constants[value] for value in node.inputs if value is not None}
    try:
        results = run_node(ir.serde.serialize_node(node), feeds, _opset(node, model))
    except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError):
        return  # Unknown content is not an error: the shape may be enough.
    for value, result in zip(node.outputs, results, strict=True):
        constants[value] = np.asarray(result)


def run_constant(node: ir.Node, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The first output of a node of the ONNX standard in a graph, from the contents of its inputs by name."""
    assert node.graph is not None
    opset = node.version or node.graph.opset_imports.get(node.domain, 1)
    return np.array(run_node(ir.serde.serialize_node(node), feeds, opset)[0], order="C")


def run_node(proto: onnx.NodeProto, feeds: dict[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """Outputs of one node of the ONNX standard, computed by ONNX's reference evaluator.

    Args:
        proto: the node.
        feeds: its inputs by name.
        opset: version of the operator set that the node follows.
    """
    if opset >= _AXES_ARE_INPUTS:
        return list(onnx.reference.ReferenceEvaluator(proto).run(None, feeds))
    # The evaluator assumes the newest opset for a single node, and for a model the opset that it imports.
    inputs = [onnx.ValueInfoProto(name=name) for name in feeds]
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output]
    imports = [onnx.helper.make_opsetid("", opset)]
    model = onnx.helper.make_model(onnx.helper.make_graph([proto], "node", inputs, outputs), opset_imports=imports)
    return list(onnx.reference.ReferenceEvaluator(model).run(None, feeds))
