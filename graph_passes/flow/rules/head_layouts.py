"""The layout of heads in the inputs and outputs of the operators that compute a whole attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import onnx_ir as ir

from graph_passes.flow.rule import RuleContext

Per = Literal["query", "key"]
"""Whether a run has one entry for each query head or for each key/value head."""

Attributes = dict[str, int | tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class HeadAxis:
    """The position of heads in one tensor.

    Attributes:
        axis: the axis that holds the heads.
        runs: consecutive runs along the axis; each holds `width` indices of every query or key/value head.
    """

    axis: int
    runs: tuple[tuple[Per, int], ...]


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """The position of heads in every tensor of an attention operator.

    Attributes:
        heads: number of query heads.
        kv_heads: number of key/value heads.
        inputs: for each input; None: it has no heads, or is broadcast over them.
        outputs: for each output.
        attributes: the attributes that state the numbers of heads, given the numbers of (query, key/value) heads.
        query_axis: the axis of query positions in the first input and output; None: positions are not passed on.
    """

    heads: int
    kv_heads: int
    inputs: tuple[HeadAxis | None, ...]
    outputs: tuple[HeadAxis | None, ...]
    attributes: Callable[[int, int], Attributes]
    query_axis: int | None = None


def standard_attention(node: ir.Node, context: RuleContext) -> HeadLayout:
    """ONNX `Attention` on `[batch, heads, length, width]`, or on `[batch, length, heads * width]` with attributes."""
    query, key, value = (node.inputs[position] for position in range(3))
    if len(context.shape(query)) == 4:
        heads, kv_heads = context.shape(query)[1], context.shape(key)[1]
        operands: list[HeadAxis | None] = [HeadAxis(1, ((per, 1),)) for per in ("query", "key", "key")]
        output = operands[0]

        def attributes(query_heads: int, key_heads: int) -> Attributes:
            return {}
    else:
        heads, kv_heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
        operands = [
            _merged(context, query, 2, heads, "query"),
            _merged(context, key, 2, kv_heads, "key"),
            _merged(context, value, 2, kv_heads, "key"),
        ]
        output = HeadAxis(2, (("query", context.shape(value)[2] // kv_heads),))

        def attributes(query_heads: int, key_heads: int) -> Attributes:
            return {"q_num_heads": query_heads, "kv_num_heads": key_heads}

    mask = _input(node, 3)
    head_axis = len(context.shape(mask)) - 3 if mask is not None else -1  # the last axes are those of the scores
    inputs = [*operands, _separate(context, mask, head_axis) if head_axis >= 0 else None]
    inputs += [_separate(context, _input(node, position), 1, "key") for position in (4, 5)]
    cache = [HeadAxis(1, (("key", 1),)), HeadAxis(1, (("key", 1),)), HeadAxis(1, (("query", 1),))]
    outputs = _outputs(node, output, cache)
    return HeadLayout(heads, kv_heads, tuple(inputs), outputs, attributes, len(context.shape(query)) - 2)


def multi_head_attention(node: ir.Node, context: RuleContext) -> HeadLayout:
    """`com.microsoft.MultiHeadAttention`: separate, packed or already split query, key and value."""
    heads = node.attributes["num_heads"].as_int()
    inputs: list[HeadAxis | None] = []
    for value in (_input(node, position) for position in range(3)):
        rank = len(context.shape(value)) if value is not None else 0
        inputs.append(_merged(context, value, 1 if rank == 4 else 2, heads, "query"))
    if _input(node, 3) is not None:
        shapes = [context.shape(_input(node, position)) for position in range(3)]
        widths = [shape[1] * shape[3] if len(shape) == 4 else shape[2] for shape in shapes]
        inputs.append(HeadAxis(0, tuple(("query", width // heads) for width in widths)))
    else:
        inputs.append(None)
    inputs.append(None)
    inputs += [_separate(context, _input(node, position), 1) for position in (5, 6, 7)]
    output = HeadAxis(2, (("query", context.shape(node.outputs[0])[2] // heads),))
    cache = [HeadAxis(1, (("query", 1),))] * 3
    return HeadLayout(heads, heads, tuple(inputs), _outputs(node, output, cache), lambda query, _: {"num_heads": query})


def packed_attention(node: ir.Node, context: RuleContext) -> HeadLayout:
    """`com.microsoft.Attention`: one weight holds the projections of query, key and value, side by side."""
    heads = node.attributes["num_heads"].as_int()
    total = context.shape(node.inputs[1])[1]
    sizes = node.attributes.get_ints("qkv_hidden_sizes", (total // 3,) * 3)
    widths = tuple(int(size) // heads for size in sizes)
    runs: tuple[tuple[Per, int], ...] = tuple(("query", width) for width in widths)
    past = HeadAxis(2, (("query", 1),)) if _input(node, 4) is not None else None
    bias = HeadAxis(0, runs) if _input(node, 2) is not None else None
    inputs = (None, HeadAxis(1, runs), bias, None, past, _separate(context, _input(node, 5), 1))

    def attributes(query_heads: int, _: int) -> Attributes:
        return {"num_heads": query_heads, "qkv_hidden_sizes": tuple(width * query_heads for width in widths)}

    outputs = _outputs(node, HeadAxis(2, (("query", widths[2]),)), [HeadAxis(2, (("query", 1),))])
    return HeadLayout(heads, heads, inputs, outputs, attributes)


def grouped_query_attention(node: ir.Node, context: RuleContext) -> HeadLayout:
    """`com.microsoft.GroupQueryAttention`: query heads share key/value heads; all may be packed in the first input."""
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    size = context.shape(node.inputs[0])[2]
    if _input(node, 1) is None:
        width = size // (heads + 2 * kv_heads)
        packed = HeadAxis(2, (("query", width), ("key", width), ("key", width)))
        operands: list[HeadAxis | None] = [packed, None, None]
    else:
        width = size // heads
        operands = [HeadAxis(2, ((per, width),)) for per in ("query", "key", "key")]
    past = [_separate(context, _input(node, position), 1, "key") for position in (3, 4)]
    bias, sink = _separate(context, _input(node, 10), 1), _separate(context, _input(node, 11), 0)
    outputs = _outputs(node, HeadAxis(2, (("query", width),)), [HeadAxis(1, (("key", 1),))] * 2)
    return HeadLayout(
        heads,
        kv_heads,
        (*operands, *past, *(None,) * 5, bias, sink),
        outputs,
        lambda query_heads, key_heads: {"num_heads": query_heads, "kv_num_heads": key_heads},
    )


def rotary_embedding(node: ir.Node, context: RuleContext) -> HeadLayout:
    """`RotaryEmbedding` of ONNX and ONNX Runtime, on an axis of heads or heads * width; each head is rotated alone."""
    shape = context.shape(node.inputs[0])
    states_heads = "num_heads" in node.attributes
    if len(shape) == 4:
        heads, head_axis = shape[1], HeadAxis(1, (("query", 1),))
    else:
        heads = node.attributes.get_int("num_heads", 0)
        if heads == 0:
            # The tables hold half of one head's width, and the whole width is rotated.
            tables = context.shape(_input(node, 1 if node.domain in ("", "ai.onnx") else 2))
            heads = shape[2] // (2 * tables[-1])
        head_axis = HeadAxis(2, (("query", shape[2] // heads),))

    def attributes(query_heads: int, _: int) -> Attributes:
        return {"num_heads": query_heads} if states_heads else {}

    return HeadLayout(heads, heads, (head_axis,), (head_axis,), attributes)


def _input(node: ir.Node, position: int) -> ir.Value | None:
    return node.inputs[position] if position < len(node.inputs) else None


def _outputs(node: ir.Node, output: HeadAxis | None, cache: Sequence[HeadAxis | None]) -> tuple[HeadAxis | None, ...]:
    """The position of heads in the outputs that the node has."""
    return (output, *cache)[: len(node.outputs)]


def _merged(context: RuleContext, value: ir.Value | None, axis: int, heads: int, per: Per) -> HeadAxis | None:
    """Heads on an axis of heads * width; None for an absent tensor."""
    return None if value is None else HeadAxis(axis, ((per, context.shape(value)[axis] // heads),))


def _separate(context: RuleContext, value: ir.Value | None, axis: int, per: Per = "query") -> HeadAxis | None:
    """Heads on an axis of their own; None for an absent tensor, and for one that is broadcast along it."""
    return None if value is None or context.shape(value)[axis] == 1 else HeadAxis(axis, ((per, 1),))
