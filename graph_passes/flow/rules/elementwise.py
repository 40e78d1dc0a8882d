"""Operators that compute each output element from the input elements at its own position."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from graph_passes.flow.rule import RuleContext
from graph_passes.flow.rules.labels import LabelRule, Labels, broadcast


def _pointwise(linear: frozenset[int], operands: int | None) -> Callable[[ir.Node, RuleContext], Labels]:
    """Labels of an operator whose first `operands` inputs (None: all of them) are broadcast together."""

    def describe(node: ir.Node, context: RuleContext) -> Labels:
        inputs, output = broadcast(node, context, range(len(node.inputs) if operands is None else operands))
        return Labels(tuple(inputs), tuple(output for _ in node.outputs), linear)

    return describe


def _rule(linear: str = "", operands: int | None = None) -> LabelRule:
    """A pointwise rule; `linear` lists the positions of the inputs that are factors, one digit each."""
    return LabelRule(_pointwise(frozenset(int(position) for position in linear), operands))


_ONE_INPUT = (
    "Abs Acos Asin Atan BitwiseNot Ceil Celu Cos Elu Erf Exp Floor Gelu HardSigmoid HardSwish IsInf IsNaN LeakyRelu "
    "Log Mish Not Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Swish"
)
_BROADCAST = (
    "Add And BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Or Pow "
    "PRelu Sub Sum Where Xor"
)

RULES = {
    **{("", op): _rule(operands=1) for op in _ONE_INPUT.split()},
    **{("", op): _rule() for op in _BROADCAST.split()},
    **{("", op): _rule(linear="0", operands=1) for op in ("Cast", "CastLike", "Dropout", "Identity", "Neg")},
    ("", "Clip"): _rule(operands=1),
    ("", "Mul"): _rule(linear="01"),
    ("", "Div"): _rule(linear="0"),
    **{("com.microsoft", op): _rule(operands=1) for op in ("Gelu", "QuickGelu")},
    **{("com.microsoft", op): _rule() for op in ("BiasGelu", "FastGelu")},
}
