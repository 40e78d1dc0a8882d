"""Operators that compute each output element from the input elements at its own place."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from graph_passes.flow.axis_flow import Flow
from graph_passes.flow.rules.labels import LabelRule, Labels, broadcast


def _pointwise(linear: frozenset[int], data: int | None) -> Callable[[ir.Node, Flow], Labels]:
    """Labels of an operator whose first `data` inputs (None: all of them) are broadcast together."""

    def describe(node: ir.Node, flow: Flow) -> Labels:
        inputs, out = broadcast(node, flow, range(len(node.inputs) if data is None else data))
        outputs = tuple(out for _ in node.outputs)
        return Labels(tuple(inputs), outputs, linear)

    return describe


def _rule(linear: str = "", data: int | None = None) -> LabelRule:
    return LabelRule(_pointwise(frozenset(int(position) for position in linear), data))


_ONE_INPUT = (
    "Abs Acos Asin Atan BitwiseNot Ceil Celu Cos Elu Erf Exp Floor Gelu HardSigmoid HardSwish IsInf IsNaN LeakyRelu "
    "Log Mish Not Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Swish"
)
_BROADCAST = (
    "Add And BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Or Pow "
    "PRelu Sub Sum Where Xor"
)

RULES = {
    **{("", op): _rule(data=1) for op in _ONE_INPUT.split()},
    **{("", op): _rule() for op in _BROADCAST.split()},
    **{("", op): _rule(linear="0", data=1) for op in ("Cast", "CastLike", "Dropout", "Identity", "Neg")},
    ("", "Clip"): _rule(data=1),
    ("", "Mul"): _rule(linear="01"),
    ("", "Div"): _rule(linear="0"),
    **{("com.microsoft", op): _rule(data=1) for op in ("Gelu", "QuickGelu")},
    **{("com.microsoft", op): _rule() for op in ("BiasGelu", "FastGelu")},
}
