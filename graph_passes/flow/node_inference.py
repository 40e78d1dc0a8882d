"""Shape, type and small content of one node's outputs, from those of its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.checker
import onnx.reference
import onnx_ir as ir

Shape = tuple[int, ...]

# Integer arithmetic that exporters use to compute shapes; anything else keeps its content to itself.
_SHAPE_ARITHMETIC = frozenset(
    "Add And Cast CastLike Concat Constant ConstantOfShape Div Equal Expand Floor Gather Identity Less Max Min Mod Mul "
    "Neg Not Or Range ReduceProd ReduceSum Reshape Slice Split Sqrt Squeeze Sub Transpose Unsqueeze Where".split()
)

LARGEST_CONSTANT = 4096
"""Elements of the largest tensor whose content is followed."""

# Since this version of the standard, every operator above takes its axes as an input.
_AXES_ARE_INPUTS = 18

# Operators that are functions of others in the standard before version 16, for which ONNX's inference gives nothing.
_OLD_COMPARES = frozenset(("GreaterOrEqual", "LessOrEqual"))

# Operators beside the ONNX standard whose first output has the shape of their first input.
_SAME_SHAPE = frozenset(
    "BiasGelu FastGelu Gelu QuickGelu RotaryEmbedding SimplifiedLayerNormalization "
    "SkipLayerNormalization SkipSimplifiedLayerNormalization".split()
)

# What ONNX's own inference raises for operators, or types, that it does not know.
_UNKNOWN = (
    onnx.defs.SchemaError,
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
)


def infer(
    node: ir.Node,
    model: ir.Model,
    shapes: dict[ir.Value, Shape],
    types: dict[ir.Value, onnx.TypeProto],
    constants: dict[ir.Value, np.ndarray],
) -> Iterator[tuple[ir.Value, Shape | None, ir.DataType | None]]:
    """Shape and type of each output of a node, as far as its inputs tell."""
    special = _foreign_shape(node, shapes)
    if special is not None:
        # The embedding's first inputs are ids; its data come third.
        first = node.inputs[2 if node.op_type == "EmbedLayerNormalization" else 0]
        dtype = types[first].tensor_type.elem_type if first in types else 0
        dtype = ir.DataType.BOOL.value if node.op_type in _OLD_COMPARES else dtype
        yield node.outputs[0], special, ir.DataType(dtype) if dtype else None
        for place, value in enumerate(node.outputs[1:], 1):
            # The sum that is normed, which the next skip goes on from.
            summed = place == 3 and node.op_type.startswith("Skip")
            yield value, special if summed else None, ir.DataType(dtype) if summed and dtype else None
        return
    inferred: dict[str, onnx.TypeProto] = {}
    try:
        proto = ir.serde.serialize_node(node)
        schema = onnx.defs.get_schema(node.op_type, _opset(node, model), node.domain)
        inferred = onnx.shape_inference.infer_node_outputs(
            schema,
            proto,
            {v.name: types[v] for v in node.inputs if v is not None and v in types and v.name},
            {
                v.name: onnx.numpy_helper.from_array(constants[v], v.name)
                for v in node.inputs
                if v is not None and v in constants and v.name
            },
            opset_imports=[onnx.helper.make_opsetid(domain, v) for domain, v in model.graph.opset_imports.items()],
            ir_version=model.ir_version,
        )
    except _UNKNOWN:
        pass  # An operator that ONNX does not know: what the file itself records has to do.
    for value in node.outputs:
        kind = inferred.get(value.name or "")
        if kind is None or not kind.HasField("tensor_type"):
            yield value, None, None
            continue
        dims = kind.tensor_type.shape.dim
        known = kind.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims)
        shape = tuple(dim.dim_value for dim in dims) if known else None
        yield value, shape, ir.DataType(kind.tensor_type.elem_type)


def _opset(node: ir.Node, model: ir.Model) -> int:
    return node.version or model.graph.opset_imports.get(node.domain, 1)


def _foreign_shape(node: ir.Node, shapes: dict[ir.Value, Shape]) -> Shape | None:
    """First output's shape of the operators that ONNX's own inference does not know."""
    if node.op_type in _OLD_COMPARES and node.domain in ("", "ai.onnx"):
        operands = [shapes[value] for value in node.inputs if value in shapes]
        with contextlib.suppress(ValueError):
            return np.broadcast_shapes(*operands) if len(operands) == 2 else None
        return None
    first = shapes.get(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
    if node.domain == "compressor" and first is not None:  # block-sparse attention, values are as wide as its output
        value = shapes.get(node.inputs[2]) if node.inputs[2] is not None else None
        return None if value is None else (*first[:3], value[3])
    if first is None or (node.domain not in ("com.microsoft", "") and node.domain):
        return None
    if node.op_type in _SAME_SHAPE and (node.domain == "com.microsoft" or node.op_type.startswith("Simplified")):
        return first
    if node.domain != "com.microsoft":
        return None
    others = [shapes.get(value) if value is not None else None for value in node.inputs[1:3]]
    if node.op_type == "GroupQueryAttention":
        heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
        return (*first[:2], first[2] if others[0] else first[2] // (heads + 2 * kv_heads) * heads)
    if node.op_type == "EmbedLayerNormalization" and others[1] is not None:
        return (*first, others[1][1])
    if node.op_type == "Attention" and others[0] is not None:
        sizes = node.attributes.get("qkv_hidden_sizes")
        width = sizes.as_ints()[2] if sizes is not None else others[0][1] // 3
        return (*first[:2], width)
    if node.op_type == "MultiHeadAttention" and len(first) == 5:
        return (*first[:2], first[2] * first[4])
    if node.op_type == "MultiHeadAttention" and len(first) == 3:
        value = others[1] if len(others) > 1 and others[1] is not None else first
        width = value[2] if len(value) == 3 else value[1] * value[3]
        return (*first[:2], width)
    if node.op_type in ("FusedMatMul", "TransposeMatMul") and others[0] is not None:
        flag = {name: attr.as_int() for name, attr in node.attributes.items() if name in ("transA", "transB")}
        a = first[:-2] + (first[:-3:-1] if flag.get("transA") else first[-2:])
        b = others[0][:-2] + (others[0][:-3:-1] if flag.get("transB") else others[0][-2:])
        return (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    return None


def evaluate(
    node: ir.Node, model: ir.Model, shapes: dict[ir.Value, Shape], constants: dict[ir.Value, np.ndarray]
) -> None:
    """Content of a small output whose inputs are known."""
    if node.domain not in ("", "ai.onnx"):
        return
    if node.op_type in ("Shape", "Size"):
        shape = shapes.get(node.inputs[0]) if node.inputs[0] is not None else None
        if shape is not None:
            start, end = (node.attributes.get(name) for name in ("start", "end"))
            cut = slice(start.as_int() if start else None, end.as_int() if end else None)
            content = np.array(shape[cut] if node.op_type == "Shape" else np.prod(shape), dtype=np.int64)
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
        return  # Content that cannot be told is no error: the shape alone may do.
    for value, result in zip(node.outputs, results, strict=True):
        constants[value] = np.asarray(result)


def run_node(proto: onnx.NodeProto, feeds: dict[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """Outputs of one node of the standard."""
    if opset >= _AXES_ARE_INPUTS:
        return list(onnx.reference.ReferenceEvaluator(proto).run(None, feeds))
    # Alone, a node is taken for one of the newest standard; in a model, for one of the model's.
    inputs = [onnx.ValueInfoProto(name=name) for name in feeds]
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output]
    imports = [onnx.helper.make_opsetid("", opset)]
    model = onnx.helper.make_model(onnx.helper.make_graph([proto], "one", inputs, outputs), opset_imports=imports)
    return list(onnx.reference.ReferenceEvaluator(model).run(None, feeds))
