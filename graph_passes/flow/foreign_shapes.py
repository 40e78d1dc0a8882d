"""Output shapes of operators that ONNX's shape inference does not support: those of ONNX Runtime, and a few others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

Shape = tuple[int, ...]

BATCH_TRANSPOSITIONS = ("transBatchA", "transBatchB")
"""Attributes of `FusedMatMul` that make a leading axis the second last one."""

OLD_COMPARES = frozenset(("GreaterOrEqual", "LessOrEqual"))
"""Operators that are functions of others before opset 16, for which ONNX's inference gives no shape."""

_SAME_SHAPE = frozenset(
    "BiasGelu FastGelu Gelu QuickGelu RotaryEmbedding SimplifiedLayerNormalization "
    "SkipLayerNormalization SkipSimplifiedLayerNormalization".split()
)
"""Operators whose first output has the shape of their first input."""

Inputs = Sequence[Shape | None]
"""Shapes of a node's first three inputs; None: absent or unknown."""


def foreign_shape(node: ir.Node, shapes: Mapping[ir.Value, Shape]) -> Shape | None:
    """Shape of the first output of an operator that ONNX's shape inference does not support, else None.

    Args:
        node: the node.
        shapes: the known shapes of the tensors before it.
    """
    if node.op_type in OLD_COMPARES and node.domain in ("", "ai.onnx"):
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
