"""Infer shapes, types and small contents of one node's outputs from those of its inputs.

ONNX's own inference does it (`node_calls`), except for operators of ONNX Runtime and a few others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.node_calls import Known, Shape, node_call, output_contents, output_types
from graph_passes.tape import shape_axes

# Operators with which exporters compute shapes; outputs of other operators are not evaluated.
_SHAPE_ARITHMETIC = frozenset(
    "Add And Cast CastLike Concat Constant ConstantOfShape Div Equal Expand Floor Gather Identity Less Max Min Mod Mul "
    "Neg Not Or Range ReduceProd ReduceSum Reshape Sign Slice Split Sqrt Squeeze Sub Transpose Unsqueeze Where".split()
)

BATCH_TRANSPOSITIONS = ("transBatchA", "transBatchB")
"""Attributes of `FusedMatMul` that make a leading axis the second last one."""

_OLD_COMPARES = frozenset(("GreaterOrEqual", "LessOrEqual"))
"""Operators that are functions of others before opset 16, for which ONNX's inference gives no shape."""

_SAME_SHAPE = frozenset(
    "BiasGelu FastGelu Gelu QuickGelu RotaryEmbedding SimplifiedLayerNormalization "
    "SkipLayerNormalization SkipSimplifiedLayerNormalization".split()
)
"""Operators whose first output has the shape of their first input."""

Inputs = Sequence[Shape | None]
"""Shapes of a node's first three inputs; None: absent or unknown."""

_WEIGHTS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
"""Position of the weights among the inputs of a convolution."""
_POOLS = frozenset(("AveragePool", "LpPool", "MaxPool"))

LARGEST_CONSTANT = 4096
"""Maximum number of elements of a tensor whose content is evaluated."""

Inferred = tuple[ir.Value, Shape | None, ir.DataType | None]
"""A tensor, its shape and its type; None where they are unknown."""


def infer(node: ir.Node, model: ir.Model, known: Known) -> Iterator[Inferred]:
    """Shape and type of each output of a node of a model, as far as its inputs determine them."""
    shape = _foreign_shape(node, known.shapes)
    if shape is not None:
        yield from _infer_foreign(node, shape, known.types)
        return
    call = node_call(node, model, known) if _is_safe(node, known.shapes) else None
    if call is None:
        yield from ((value, None, None) for value in node.outputs)
        return
    for value, (shape, dtype) in zip(node.outputs, output_types(call), strict=True):
        yield value, shape, dtype


def _is_safe(node: ir.Node, shapes: dict[ir.Value, Shape]) -> bool:
    """Whether ONNX's inference can read a node without an assertion that would end the process.

    It clamps the ends of a `Slice` to the sizes of its input, which fails where nothing is left of an axis. Negative
    sizes, which it infers for a window larger than its input, do not get this far.
    """
    if leaves_nothing(node, shapes):
        return False
    source = node.inputs[0] if node.inputs else None
    return not (node.op_type == "Slice" and source in shapes and 0 in shapes[source])


def _infer_foreign(node: ir.Node, shape: Shape, types: dict[ir.Value, ir.DataType]) -> Iterator[Inferred]:
    """Shapes and types of the outputs of a foreign operator, from the shape of its first output."""
    # The first inputs of an embedding are ids; its data come third.
    data = node.inputs[2 if node.op_type == "EmbedLayerNormalization" else 0]
    dtype = types.get(data) if data is not None else None
    dtype = ir.DataType.BOOL if node.op_type in _OLD_COMPARES else dtype
    yield node.outputs[0], shape, dtype
    for position, value in enumerate(node.outputs[1:], 1):
        # The fourth output is the sum that is normalized, which the next residual adds to.
        is_sum = position == 3 and node.op_type.startswith("Skip")
        yield value, shape if is_sum else None, dtype if is_sum else None


def evaluate(node: ir.Node, model: ir.Model, known: Known) -> None:
    """Add the content of a node's small outputs to what is known if the content of its inputs is."""
    shapes, constants = known.shapes, known.constants
    if node.domain:
        return
    if node.op_type in ("Shape", "Size"):
        shape = shapes.get(node.inputs[0]) if node.inputs[0] is not None else None
        if shape is not None:
            selected = [shape[axis] for axis in shape_axes(node, len(shape))]
            content = np.array(selected if node.op_type == "Shape" else np.prod(shape), dtype=np.int64)
            constants[node.outputs[0]] = content
            shapes.setdefault(node.outputs[0], content.shape)
        return
    if node.op_type not in _SHAPE_ARITHMETIC or any(v is not None and v not in constants for v in node.inputs):
        return
    outputs = [shapes.get(value) for value in node.outputs]
    if any(shape is None or np.prod(shape, dtype=np.int64) > LARGEST_CONSTANT for shape in outputs):
        return
    call = node_call(node, model, known)
    contents = () if call is None else output_contents(call)
    if contents:
        constants.update(zip(node.outputs, contents, strict=True))


def leaves_nothing(node: ir.Node, shapes: Mapping[ir.Value, Shape]) -> bool:
    """Whether the window of a convolution or a pooling is larger than its padded input.

    No shape can be inferred from it.
    """
    if not has_window(node):
        return False
    sizes = spatial_sizes(node.inputs[0], shapes)
    window: Sequence[int] = node.attributes.get_ints("kernel_shape", ())
    if not window and node.op_type in _WEIGHTS:
        window = spatial_sizes(node.inputs[_WEIGHTS[node.op_type]], shapes)
    if not sizes or len(window) != len(sizes) or node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):
        return False
    rank = len(sizes)
    pads = node.attributes.get_ints("pads", (0,) * 2 * rank)
    dilations = node.attributes.get_ints("dilations", (1,) * rank)
    return any(
        size + pads[axis] + pads[rank + axis] < dilations[axis] * (window[axis] - 1) + 1
        for axis, size in enumerate(sizes)
    )


def has_window(node: ir.Node) -> bool:
    """Whether a node is a convolution or a pooling."""
    return not node.domain and (node.op_type in _WEIGHTS or node.op_type in _POOLS)


def spatial_sizes(value: ir.Value | None, shapes: Mapping[ir.Value, Shape]) -> Shape:
    """The sizes of a tensor without its first two axes; empty where they are unknown."""
    return shapes[value][2:] if value is not None and value in shapes else ()


def _foreign_shape(node: ir.Node, shapes: Mapping[ir.Value, Shape]) -> Shape | None:
    """Shape of the first output of an operator that ONNX's shape inference does not support, else None."""
    if node.op_type in _OLD_COMPARES and not node.domain:
        operands = [shapes[value] for value in node.inputs if value is not None and value in shapes]
        with contextlib.suppress(ValueError):
            return np.broadcast_shapes(*operands) if len(operands) == 2 else None
        return None
    known = [shapes.get(value) if value is not None else None for value in node.inputs[:3]]
    inputs = (*known, None, None, None)[:3]
    first = inputs[0]
    if first is None:
        return None
    if node.domain == "compressor":  # block-sparse attention: its output is as wide as its values
        return None if inputs[2] is None else (*first[:3], inputs[2][3])
    of_runtime = node.domain == "com.microsoft"
    if node.op_type in _SAME_SHAPE and (of_runtime or (not node.domain and node.op_type.startswith("Simplified"))):
        return first
    shape = _SHAPES.get(node.op_type) if of_runtime else None
    return None if shape is None else shape(node, first, inputs)


def _grouped_query_attention(node: ir.Node, query: Shape, inputs: Inputs) -> Shape:
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    return (*query[:2], query[2] if inputs[1] else query[2] // (heads + 2 * kv_heads) * heads)


def _embed_layer_normalization(node: ir.Node, ids: Shape, inputs: Inputs) -> Shape | None:
    return None if inputs[2] is None else (*ids, inputs[2][1])


def _packed_attention(node: ir.Node, hidden: Shape, inputs: Inputs) -> Shape | None:
    if inputs[1] is None:
        return None
    sizes = node.attributes.get("qkv_hidden_sizes")
    return (*hidden[:2], sizes.as_ints()[2] if sizes is not None else inputs[1][1] // 3)


def _multi_head_attention(node: ir.Node, query: Shape, inputs: Inputs) -> Shape | None:
    if len(query) == 5:  # packed: [batch, length, heads, 3, width]
        return (*query[:2], query[2] * query[4])
    if len(query) != 3:
        return None
    value = inputs[2] or query
    return (*query[:2], value[2] if len(value) == 3 else value[1] * value[3])


def _fused_matmul(node: ir.Node, left: Shape, inputs: Inputs) -> Shape | None:
    right = inputs[1]
    if right is None or any(node.attributes.get_int(name, 0) for name in BATCH_TRANSPOSITIONS):
        return None
    if node.attributes.get_int("transA", 0):
        left = (*left[:-2], left[-1], left[-2])
    if node.attributes.get_int("transB", 0):
        right = (*right[:-2], right[-1], right[-2])
    return (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])


_SHAPES: Mapping[str, Callable[[ir.Node, Shape, Inputs], Shape | None]] = {
    "GroupQueryAttention": _grouped_query_attention,
    "EmbedLayerNormalization": _embed_layer_normalization,
    "Attention": _packed_attention,
    "MultiHeadAttention": _multi_head_attention,
    "FusedMatMul": _fused_matmul,
    "TransposeMatMul": _fused_matmul,
}
