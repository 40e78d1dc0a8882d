"""Rules of `QuantizeLinear` and `DequantizeLinear`, which round each element by the scale of its channel."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import NoRuleError, RuleContext
from graph_passes.flow.rules.labels import AxisLabels, LabelRule, Labels


def _channels(node: ir.Node, context: RuleContext) -> Labels:
    """Scales and zero points are scalars, or have one element for each index of one axis."""
    if node.attributes.get_int("block_size", 0):
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, "has a scale for each block of an axis")
    rank = len(context.shape(node.inputs[0]))
    axes: AxisLabels = tuple(range(rank))
    axis = node.attributes.get_int("axis", 1)
    inputs: list[AxisLabels | None] = [axes]
    for value in node.inputs[1:]:
        size = () if value is None else context.shape(value)
        inputs.append(None if value is None else (axis % rank,) if size != (1,) and size else (None,) * len(size))
    return Labels(tuple(inputs), (axes,))


RULES = {("", op): LabelRule(_channels) for op in ("QuantizeLinear", "DequantizeLinear")}
"""The rules of all operators, by (domain, operator type)."""
