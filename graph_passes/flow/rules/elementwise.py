"""Operators that compute each output element from the input elements at its own position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir

from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import Gain, NoRuleError, RuleContext
from graph_passes.flow.rules.labels import AxisLabels, LabelRule, Labels, broadcast


def _pointwise(factors: Collection[int] = (), operands: int | None = None) -> Callable[[ir.Node, RuleContext], Labels]:
    """Labels of an operator whose first `operands` inputs (None: all of them) are broadcast together.

    `factors` are the positions of the inputs whose zeros are zeros of the output.
    """

    def describe(node: ir.Node, context: RuleContext) -> Labels:
        inputs, output = broadcast(node, context, range(len(node.inputs) if operands is None else operands))
        return Labels(tuple(inputs), tuple(output for _ in node.outputs), frozenset(factors))

    return describe


def _selected(node: ir.Node, context: RuleContext) -> Labels:
    """Where: an input is a factor of the output if zeros replace its elements."""
    factors = {source for source, replaced in ((1, 2), (2, 1)) if context.probe.is_zero(node.inputs[replaced])}
    return _pointwise(factors)(node, context)


def _channels(node: ir.Node, context: RuleContext) -> Labels:
    """QuantizeLinear and DequantizeLinear round each element by the scale of its channel.

    Scales and zero points are scalars, or have one element for each index of one axis.
    """
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


class _PowerRule(LabelRule):
    """Pow. With a constant exponent, a positive integer, factors of the base are raised to it too."""

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        base, exponent = gains[0], context.probe.constant(node.inputs[1])
        if base is None or exponent is None or exponent.size != 1 or exponent.item() not in (1, 2, 3, 4):
            raise NoRuleError(RefusalCode.NOT_LINEAR, "is not a product with the gated tensor")
        axes = tuple(None if factors is None else factors ** int(exponent.item()) for factors in base.axes)
        return super().gain(node, [Gain(axes, base.sites), *gains[1:]], context)


_ONE_INPUT = (
    "Abs Acos Asin Atan BitwiseNot Ceil Celu Cos Elu Erf Exp Floor Gelu HardSigmoid HardSwish IsInf IsNaN LeakyRelu "
    "Log Mish Not Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Swish"
)
_BROADCAST = (
    "Add And BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Or "
    "PRelu Sub Sum Xor"
)

RULES = {
    **{("", op): LabelRule(_pointwise(operands=1)) for op in _ONE_INPUT.split()},
    **{("", op): LabelRule(_pointwise()) for op in _BROADCAST.split()},
    **{("", op): LabelRule(_pointwise((0,), operands=1)) for op in ("Cast", "CastLike", "Dropout", "Identity", "Neg")},
    ("", "Where"): LabelRule(_selected),
    ("", "Clip"): LabelRule(_pointwise(operands=1)),
    **{("", op): LabelRule(_channels) for op in ("QuantizeLinear", "DequantizeLinear")},
    ("", "Mul"): LabelRule(_pointwise((0, 1))),
    ("", "Div"): LabelRule(_pointwise((0,))),
    ("", "Pow"): _PowerRule(_pointwise((0,))),
    **{("com.microsoft", op): LabelRule(_pointwise(operands=1)) for op in ("Gelu", "QuickGelu")},
    **{("com.microsoft", op): LabelRule(_pointwise()) for op in ("BiasGelu", "FastGelu")},
}
