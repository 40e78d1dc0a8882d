"""Operators that compute a whole attention: `Attention` of ONNX, and those of ONNX Runtime.

The heads of each tensor lie one after another on one axis, sometimes in several runs (packed weights). A head is kept
or dropped whole; a key/value head is dropped when no query head that it serves is left. Where the remaining query heads
share key/value heads unevenly, key/value heads are repeated until each query head has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from graph_passes.flow.indices import Index, Need, all_indices, simplify
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import Demand, Gain, NoRuleError, Rule, RuleContext
from graph_passes.tape import input_of

Per = Literal["query", "key"]
"""Whether a run has one entry for each query head or for each key/value head."""


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
        attributes: the attributes that state the numbers of query or of key/value heads.
        packed: width of one head of query, key and value, if `qkv_hidden_sizes` states those of all heads.
        query_axis: the axis of query positions in the first input and output; None: positions are not passed on.
    """

    heads: int
    kv_heads: int
    inputs: tuple[HeadAxis | None, ...]
    outputs: tuple[HeadAxis | None, ...]
    attributes: Mapping[str, Per]
    packed: tuple[int, ...] = ()
    query_axis: int | None = None


def standard_attention(node: ir.Node, context: RuleContext) -> HeadLayout:
    """ONNX `Attention` on `[batch, heads, length, width]`, or on `[batch, length, heads * width]` with attributes."""
    query, key, value = (node.inputs[position] for position in range(3))
    if len(context.shape(query)) == 4:
        heads, kv_heads = context.shape(query)[1], context.shape(key)[1]
        operands: list[HeadAxis | None] = [HeadAxis(1, ((per, 1),)) for per in ("query", "key", "key")]
        output, attributes = operands[0], dict[str, Per]()
    else:
        heads, kv_heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
        operands = [
            _merged(context, query, 2, heads, "query"),
            _merged(context, key, 2, kv_heads, "key"),
            _merged(context, value, 2, kv_heads, "key"),
        ]
        output = HeadAxis(2, (("query", context.shape(value)[2] // kv_heads),))
        attributes = {"q_num_heads": "query", "kv_num_heads": "key"}
    mask = input_of(node, 3)
    head_axis = len(context.shape(mask)) - 3 if mask is not None else -1  # the last axes are those of the scores
    inputs = [*operands, _separate(context, mask, head_axis) if head_axis >= 0 else None]
    inputs += [_separate(context, input_of(node, position), 1, "key") for position in (4, 5)]
    cache = [HeadAxis(1, (("key", 1),)), HeadAxis(1, (("key", 1),)), HeadAxis(1, (("query", 1),))]
    outputs = _outputs(node, output, cache)
    return HeadLayout(heads, kv_heads, tuple(inputs), outputs, attributes, query_axis=len(context.shape(query)) - 2)


def multi_head_attention(node: ir.Node, context: RuleContext) -> HeadLayout:
    """`com.microsoft.MultiHeadAttention`: separate, packed or already split query, key and value."""
    heads = node.attributes["num_heads"].as_int()
    inputs: list[HeadAxis | None] = []
    for value in (input_of(node, position) for position in range(3)):
        rank = len(context.shape(value)) if value is not None else 0
        inputs.append(_merged(context, value, 1 if rank == 4 else 2, heads, "query"))
    if input_of(node, 3) is not None:
        shapes = [context.shape(input_of(node, position)) for position in range(3)]
        widths = [shape[1] * shape[3] if len(shape) == 4 else shape[2] for shape in shapes]
        inputs.append(HeadAxis(0, tuple(("query", width // heads) for width in widths)))
    else:
        inputs.append(None)
    inputs.append(None)
    inputs += [_separate(context, input_of(node, position), 1) for position in (5, 6, 7)]
    output = HeadAxis(2, (("query", context.shape(node.outputs[0])[2] // heads),))
    cache = [HeadAxis(1, (("query", 1),))] * 3
    return HeadLayout(heads, heads, tuple(inputs), _outputs(node, output, cache), {"num_heads": "query"})


def packed_attention(node: ir.Node, context: RuleContext) -> HeadLayout:
    """`com.microsoft.Attention`: one weight holds the projections of query, key and value, side by side."""
    heads = node.attributes["num_heads"].as_int()
    total = context.shape(node.inputs[1])[1]
    sizes = node.attributes.get_ints("qkv_hidden_sizes", (total // 3,) * 3)
    widths = tuple(int(size) // heads for size in sizes)
    runs: tuple[tuple[Per, int], ...] = tuple(("query", width) for width in widths)
    past = HeadAxis(2, (("query", 1),)) if input_of(node, 4) is not None else None
    bias = HeadAxis(0, runs) if input_of(node, 2) is not None else None
    inputs = (None, HeadAxis(1, runs), bias, None, past, _separate(context, input_of(node, 5), 1))
    outputs = _outputs(node, HeadAxis(2, (("query", widths[2]),)), [HeadAxis(2, (("query", 1),))])
    return HeadLayout(heads, heads, inputs, outputs, {"num_heads": "query"}, widths)


def grouped_query_attention(node: ir.Node, context: RuleContext) -> HeadLayout:
    """`com.microsoft.GroupQueryAttention`: query heads share key/value heads; all may be packed in the first input."""
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    size = context.shape(node.inputs[0])[2]
    if input_of(node, 1) is None:
        width = size // (heads + 2 * kv_heads)
        packed = HeadAxis(2, (("query", width), ("key", width), ("key", width)))
        operands: list[HeadAxis | None] = [packed, None, None]
    else:
        width = size // heads
        operands = [HeadAxis(2, ((per, width),)) for per in ("query", "key", "key")]
    past = [_separate(context, input_of(node, position), 1, "key") for position in (3, 4)]
    bias, sink = _separate(context, input_of(node, 10), 1), _separate(context, input_of(node, 11), 0)
    outputs = _outputs(node, HeadAxis(2, (("query", width),)), [HeadAxis(1, (("key", 1),))] * 2)
    inputs = (*operands, *past, *(None,) * 5, bias, sink)
    return HeadLayout(heads, kv_heads, inputs, outputs, {"num_heads": "query", "kv_num_heads": "key"})


def rotary_embedding(node: ir.Node, context: RuleContext) -> HeadLayout:
    """`RotaryEmbedding` of ONNX and ONNX Runtime, on an axis of heads or heads * width; each head is rotated alone."""
    shape = context.shape(node.inputs[0])
    if len(shape) == 4:
        heads, head_axis = shape[1], HeadAxis(1, (("query", 1),))
    else:
        heads = node.attributes.get_int("num_heads", 0)
        if heads == 0:
            # The tables hold half of one head's width, and the whole width is rotated.
            tables = context.shape(input_of(node, 2 if node.domain else 1))
            heads = shape[2] // (2 * tables[-1])
        head_axis = HeadAxis(2, (("query", shape[2] // heads),))
    attributes: dict[str, Per] = {"num_heads": "query"} if "num_heads" in node.attributes else {}
    return HeadLayout(heads, heads, (head_axis,), (head_axis,), attributes)


def _outputs(node: ir.Node, output: HeadAxis | None, cache: Sequence[HeadAxis | None]) -> tuple[HeadAxis | None, ...]:
    """The position of heads in the outputs that the node has."""
    return (output, *cache)[: len(node.outputs)]


def _merged(context: RuleContext, value: ir.Value | None, axis: int, heads: int, per: Per) -> HeadAxis | None:
    """Heads on an axis of heads * width; None for an absent tensor."""
    return None if value is None else HeadAxis(axis, ((per, context.shape(value)[axis] // heads),))


def _separate(context: RuleContext, value: ir.Value | None, axis: int, per: Per = "query") -> HeadAxis | None:
    """Heads on an axis of their own; None for an absent tensor, and for one that is broadcast along it."""
    return None if value is None or context.shape(value)[axis] == 1 else HeadAxis(axis, ((per, 1),))


@dataclasses.dataclass(frozen=True)
class AttentionRule(Rule):
    """The rule of one fused operator.

    Attributes:
        layout: the layout of heads in the inputs and outputs of a node.
        caches: positions of the inputs with earlier keys and values, and of the outputs with those of all positions.
    """

    layout: Callable[[ir.Node, RuleContext], HeadLayout]
    caches: tuple[tuple[int, int], ...] = ()

    def continued(self, node: ir.Node) -> Iterable[tuple[int, int]]:
        return self.caches

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        layout = self.layout(node, context)
        queries = _needed_queries(node, layout, outputs, context)
        heads = self._needed_heads(node, layout, outputs, context)
        keys, is_even = _keys_of(heads, layout)
        if not is_even and any(value.is_graph_output() for value in node.outputs[1:]):
            why = "keeps different numbers of query heads of its key/value heads, which it also returns as a cache"
            raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, why)
        inputs = tuple(
            None if value is None else _need_of_heads(layout, head_axis, heads, keys, value, context)
            for value, head_axis in zip(node.inputs, _input_axes(node, layout), strict=False)
        )
        held = tuple(
            _need_of_heads(layout, head_axis if _is_read(value, context) else None, heads, keys, value, context)
            for value, head_axis in zip(node.outputs, layout.outputs, strict=False)
        )
        if queries is not None and layout.query_axis is not None:
            inputs = _with_queries(node, inputs, layout.query_axis, queries, context)
            held = (_with_index(held[0], layout.query_axis, queries), *held[1:])
        return Demand(inputs, held)

    def _needed_heads(
        self, node: ir.Node, layout: HeadLayout, outputs: Sequence[Need], context: RuleContext
    ) -> np.ndarray:
        """Query heads that the outputs need, ascending."""
        needed: set[int] = set()
        shared = layout.heads // layout.kv_heads
        for value, head_axis, need in zip(node.outputs, layout.outputs, outputs, strict=False):
            if head_axis is None or not _is_read(value, context):
                continue
            needed_axes = (head_axis.axis, layout.query_axis if value is node.outputs[0] else None)
            if any(index is not None for axis, index in enumerate(need) if axis not in needed_axes):
                why = "computes every index of the axes that are not the heads'"
                raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, why)
            index = need[head_axis.axis] if need else None
            per, width = head_axis.runs[0]
            heads = set(range(layout.heads if per == "query" else layout.kv_heads) if index is None else index // width)
            if value is node.outputs[0]:
                needed = heads
            elif not heads <= (needed if per == "query" else {head // shared for head in needed}):
                raise NoRuleError(RefusalCode.EVERY_HEAD_NEEDED, f"also returns every head as {value.name}")
        return np.array(sorted(needed), dtype=np.int64)

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        raise NoRuleError(RefusalCode.NOT_LINEAR, "is not a product with the gated tensor")

    def carries(self, node: ir.Node, position: int, axis: int, context: RuleContext) -> Iterator[tuple[int, int]]:
        layout = self.layout(node, context)
        head_axis = _input_axes(node, layout)[position]
        if head_axis is None or head_axis.axis != axis:
            return
        if any((layout.heads if per == "query" else layout.kv_heads) > 1 for per, _ in head_axis.runs):
            yield from super().carries(node, position, axis, context)

    def mixes(self, node: ir.Node, position: int, axis: int, context: RuleContext) -> bool:
        head_axis = _input_axes(node, self.layout(node, context))[position]
        return head_axis is None or head_axis.axis != axis

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        layout = self.layout(node, context)
        output_heads = layout.outputs[0]
        assert output_heads is not None
        index = demand.outputs[0][output_heads.axis]
        if index is None:
            return
        heads = np.unique(index // output_heads.runs[0][1])
        keys, _ = _keys_of(heads, layout)
        for name, per in layout.attributes.items():
            node.attributes[name] = ir.AttrInt64(name, len(heads if per == "query" else keys))
        if layout.packed:
            sizes = [width * len(heads) for width in layout.packed]
            node.attributes["qkv_hidden_sizes"] = ir.AttrInt64s("qkv_hidden_sizes", sizes)


def _keys_of(heads: np.ndarray, layout: HeadLayout) -> tuple[np.ndarray, bool]:
    """The key/value heads of query heads, one for each of them unless they share evenly, and whether they do."""
    of_heads = heads // (layout.heads // layout.kv_heads)
    groups, counts = np.unique(of_heads, return_counts=True)
    is_even = bool((counts == counts[:1]).all())
    return (groups if is_even else of_heads), is_even


def _input_axes(node: ir.Node, layout: HeadLayout) -> tuple[HeadAxis | None, ...]:
    """The position of heads in each input; inputs that the layout does not list have no heads."""
    return (*layout.inputs, *(None,) * len(node.inputs))


def _is_read(value: ir.Value, context: RuleContext) -> bool:
    return value not in context.unread and (bool(value.uses()) or value.is_graph_output())


def _needed_queries(node: ir.Node, layout: HeadLayout, outputs: Sequence[Need], context: RuleContext) -> Index:
    """Query positions that the first output needs; None: all. Their numbers and scores must not matter."""
    if layout.query_axis is None or not outputs[0] or outputs[0][layout.query_axis] is None:
        return None
    scores = node.outputs[3:]
    if node.attributes.get_int("is_causal", 0) or any(_is_read(value, context) for value in scores):
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, "computes every query, because it counts or returns them")
    return outputs[0][layout.query_axis]


def _with_queries(
    node: ir.Node, inputs: tuple[Need | None, ...], axis: int, queries: np.ndarray, context: RuleContext
) -> tuple[Need | None, ...]:
    """The needs of the inputs of `Attention` for some query positions: of the queries, and of the mask's rows."""
    cut = list(inputs)
    cut[0] = _with_index(inputs[0] or (), axis, queries)
    mask = input_of(node, 3)
    if mask is not None and not context.is_broadcast(mask, -2, node.inputs[0], axis):
        cut[3] = _with_index(inputs[3] or (), len(context.shape(mask)) - 2, queries)
    return tuple(cut)


def _with_index(need: Need, axis: int, index: np.ndarray) -> Need:
    return (*need[:axis], index, *need[axis + 1 :])


def _need_of_heads(
    layout: HeadLayout,
    head_axis: HeadAxis | None,
    heads: np.ndarray,
    keys: np.ndarray,
    value: ir.Value,
    context: RuleContext,
) -> Need:
    """The indices of some heads in one tensor.

    The heads are ascending; key/value heads are repeated where query heads share them unevenly. A tensor without heads
    (`head_axis` is None) is needed whole.
    """
    if head_axis is None:
        return all_indices(len(context.probe.shape(value) or ()))
    shape = context.shape(value)
    need = list(all_indices(len(shape)))
    parts: list[np.ndarray] = []
    start = 0
    for per, width in head_axis.runs:
        selected = heads if per == "query" else keys
        parts.append((start + selected[:, None] * width + np.arange(width)).reshape(-1))
        start += width * (layout.heads if per == "query" else layout.kv_heads)
    need[head_axis.axis] = simplify(np.concatenate(parts), shape[head_axis.axis])
    return tuple(need)


RULES: dict[tuple[str, str], Rule] = {
    ("", "Attention"): AttentionRule(standard_attention, ((4, 1), (5, 2))),
    ("com.microsoft", "Attention"): AttentionRule(packed_attention, ((4, 1),)),
    ("com.microsoft", "MultiHeadAttention"): AttentionRule(multi_head_attention, ((6, 1), (7, 2))),
    ("com.microsoft", "GroupQueryAttention"): AttentionRule(grouped_query_attention, ((3, 1), (4, 2))),
    ("", "RotaryEmbedding"): AttentionRule(rotary_embedding),
    ("com.microsoft", "RotaryEmbedding"): AttentionRule(rotary_embedding),
}
