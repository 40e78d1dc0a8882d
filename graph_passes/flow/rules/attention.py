"""Operators that compute a whole attention: `Attention` of ONNX, and those of ONNX Runtime.

The heads of each tensor lie one after another on one axis, sometimes in several runs (packed weights). A head is kept
or dropped whole; a key/value head is dropped when no query head that it serves is left. Where the remaining query heads
share key/value heads unevenly, key/value heads are repeated until each query head has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.indices import Index, Need, all_indices, simplify
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import Demand, Gain, NoRuleError, Rule, RuleContext
from graph_passes.flow.rules.head_layouts import (
    HeadAxis,
    HeadLayout,
    grouped_query_attention,
    multi_head_attention,
    packed_attention,
    rotary_embedding,
    standard_attention,
)


@dataclasses.dataclass(frozen=True)
class AttentionRule:
    """The rule of one fused operator, from the layout of heads in its inputs and outputs."""

    layout: Callable[[ir.Node, RuleContext], HeadLayout]

    def selected_axes(self, node: ir.Node, context: RuleContext) -> Collection[int]:
        return ()

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        layout = self.layout(node, context)
        queries = _needed_queries(node, layout, outputs, context)
        heads = self._needed_heads(node, layout, outputs, context)
        shared = layout.heads // layout.kv_heads
        groups, counts = np.unique(heads // shared, return_counts=True)
        even = len(counts) == 0 or (counts == counts[0]).all()
        if not even and any(value.is_graph_output() for value in node.outputs[1:]):
            why = "keeps different numbers of query heads of its key/value heads, which it also returns as a cache"
            raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, why)
        keys = groups if even else heads // shared
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
            others = (head_axis.axis, layout.query_axis if value is node.outputs[0] else None)
            if any(index is not None for axis, index in enumerate(need) if axis not in others):
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
        if not any((layout.heads if per == "query" else layout.kv_heads) > 1 for per, _ in head_axis.runs):
            return
        carriers = [
            (output, output_heads.axis)
            for output, (value, output_heads) in enumerate(zip(node.outputs, layout.outputs, strict=False))
            if output_heads is not None and _is_read(value, context)
        ]
        if len(carriers) == 1:  # each of several outputs needs all heads
            yield carriers[0]

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
        groups, counts = np.unique(heads // (layout.heads // layout.kv_heads), return_counts=True)
        keys = len(groups) if (counts == counts[0]).all() else len(heads)
        for name, number in layout.attributes(len(heads), keys).items():
            attribute = ir.AttrInt64s if isinstance(number, tuple) else ir.AttrInt64
            node.attributes[name] = attribute(name, number)  # type: ignore[arg-type]


def _input_axes(node: ir.Node, layout: HeadLayout) -> tuple[HeadAxis | None, ...]:
    """The position of heads in each input; inputs that the layout does not list have no heads."""
    return (*layout.inputs, *(None,) * len(node.inputs))


def _is_read(value: ir.Value, context: RuleContext) -> bool:
    return value not in context.unread and (bool(value.uses()) or value.is_graph_output())


def _needed_queries(node: ir.Node, layout: HeadLayout, outputs: Sequence[Need], context: RuleContext) -> Index:
    """Query positions that the first output needs; None: all.

    Raises:
        NoRuleError: the attention depends on the position of a query, or returns its scores.
    """
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
    mask = node.inputs[3] if len(node.inputs) > 3 else None
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

    Args:
        layout: the numbers of heads.
        head_axis: the position of heads in the tensor; None: it has no heads, and all of it is needed.
        heads: the query heads, ascending.
        keys: the key/value heads, ascending; repeated where query heads share them unevenly.
        value: the tensor.
        context: the graph's shapes.
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
    ("", "Attention"): AttentionRule(standard_attention),
    ("com.microsoft", "Attention"): AttentionRule(packed_attention),
    ("com.microsoft", "MultiHeadAttention"): AttentionRule(multi_head_attention),
    ("com.microsoft", "GroupQueryAttention"): AttentionRule(grouped_query_attention),
    ("", "RotaryEmbedding"): AttentionRule(rotary_embedding),
    ("com.microsoft", "RotaryEmbedding"): AttentionRule(rotary_embedding),
}
