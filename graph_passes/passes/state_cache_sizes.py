"""State cache sizes: caches whose heads or widths exporters left free have those of the keys and values they extend."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.rule import NoRuleError, RuleContext
from graph_passes.flow.rules import RULES
from graph_passes.flow.rules.attention import AttentionRule
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed

_HEADS, _POSITIONS, _WIDTH = 1, 2, 3
"""Axes of a cache `[text, head, position, width]`."""


class StateCacheSizes(GraphPass[Names]):
    """Give inputs that a node extends by new positions, and its outputs, fixed numbers of heads and widths.

    Cases:
        1. `Concat` on the axis of positions: they are those of the new keys or values.
        2. An attention operator: its attributes and operands say them.
        3. Sizes that depend on other inputs stay.

    The report has the names of the inputs whose sizes are stated.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        extended = [
            (value, node, node.outputs[result])
            for value in filter(_is_free, model.graph.inputs)
            for node, position in value.uses()
            if (rule := RULES.get((node.domain, node.op_type))) is not None
            for source, result in rule.continued(node)
            if source == position and result < len(node.outputs)
        ]
        context, stated = RuleContext(Probe(model)) if extended else None, []
        for value, node, output in extended:
            assert context is not None
            if (sizes := _sizes(node, context)) is not None:
                for cache in (value, output, *_copies(output)):
                    _state(cache, *sizes)
                stated.append(value.name)
        return changed(model, stated)


def _is_free(value: ir.Value) -> bool:
    """Whether a tensor of four axes has a free number of heads or a free width."""
    shape = value.shape
    return shape is not None and len(shape) == 4 and not all(isinstance(shape[axis], int) for axis in (_HEADS, _WIDTH))


def _sizes(node: ir.Node, context: RuleContext) -> tuple[int, int] | None:
    """Heads and width of the keys or values that a node extends; None: they are not fixed."""
    rule = RULES[node.domain, node.op_type]
    try:
        if isinstance(rule, AttentionRule):
            layout = rule.layout(node, context)
            output = layout.outputs[0]
            return None if output is None else (layout.kv_heads, output.runs[0][1])
        new, axis = node.inputs[1], node.attributes.get_int("axis", 0)
        shape = context.shape(new)
    except NoRuleError:
        return None
    if axis not in (_POSITIONS, _POSITIONS - 4) or len(shape) != 4:
        return None
    return (shape[_HEADS], shape[_WIDTH]) if all(context.probe.fixed(new, each) for each in (_HEADS, _WIDTH)) else None


def _copies(value: ir.Value) -> list[ir.Value]:
    """The tensors that are the same under another name."""
    return [node.outputs[0] for node, _ in value.uses() if node.op_type == "Identity"]


def _state(value: ir.Value, heads: int, width: int) -> None:
    """Give a cache fixed sizes."""
    free = ir.SymbolicDim(None)
    batch, _, positions, _ = value.shape if value.shape is not None and len(value.shape) == 4 else (free,) * 4
    value.shape = ir.Shape((batch, heads, positions, width))
