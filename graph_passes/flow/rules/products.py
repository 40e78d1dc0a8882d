"""Rules of operators that sum products, where heads begin and end, and of those that mix the indices of an axis."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.flow.edit import opset
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import NoRuleError, RuleContext
from graph_passes.flow.rules.labels import AxisLabels, LabelRule, Labels, broadcast


def _batch(shape: tuple[int, ...], output_shape: tuple[int, ...]) -> AxisLabels:
    """Labels of the leading axes of a matrix operand: counted from the end of the output's leading axes."""
    leading, target = shape[:-2], output_shape[:-2]
    return tuple(
        axis - len(leading) if size == target[axis - len(leading)] else None for axis, size in enumerate(leading)
    )


def _matmul(node: ir.Node, context: RuleContext) -> Labels:
    left, right, output = (context.shape(value) for value in (*node.inputs[:2], node.outputs[0]))
    if len(left) < 2 or len(right) < 2:
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, "multiplies by a vector")
    transposed = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    rows: AxisLabels = ("k", "m") if transposed[0] else ("m", "k")
    columns: AxisLabels = ("n", "k") if transposed[1] else ("k", "n")
    leading = tuple(range(2 - len(output), 0))
    inputs = ((*_batch(left, output), *rows), (*_batch(right, output), *columns))
    return Labels(inputs, ((*leading, "m", "n"),), frozenset((0, 1)), frozenset(("k",)))


def _gemm(node: ir.Node, context: RuleContext) -> Labels:
    if any(len(context.shape(value)) != 2 for value in node.inputs[:2]):
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, "multiplies tensors that have not two axes")
    labels = _matmul(node, context)
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return labels
    shape, output = context.shape(node.inputs[2]), context.shape(node.outputs[0])
    names = ("m", "n")[2 - len(shape) :]
    sizes = output[2 - len(shape) :]
    addend = tuple(name if size == full else None for name, size, full in zip(names, shape, sizes, strict=True))
    return Labels((*labels.inputs, addend), labels.outputs, labels.linear, labels.summed)


def _einsum(node: ir.Node, context: RuleContext) -> Labels:
    equation = node.attributes["equation"].as_string().replace(" ", "")
    if "." in equation or "->" not in equation:
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, f"has the equation {equation}, which leaves axes unnamed")
    operands, output = equation.split("->")
    terms = operands.split(",")
    if any(len(set(term)) < len(term) for term in (*terms, output)):
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, f"takes a diagonal ({equation})")
    summed = frozenset(operands.replace(",", "")) - frozenset(output)
    inputs = tuple(tuple(term) for term in terms)
    return Labels(inputs, (tuple(output),), frozenset(range(len(terms))), summed)


def _along_axis(node: ir.Node, context: RuleContext) -> Labels:
    """Softmax and similar operators: every output index depends on all indices of one axis."""
    rank = len(context.shape(node.inputs[0]))
    axes = tuple(range(rank))
    if node.op_type != "LpNormalization" and opset(node) < 13:
        # Before opset 13 all axes from `axis` on were flattened into one.
        return Labels((axes,), (axes,), mixed=frozenset(axes[node.attributes.get_int("axis", 1) :]))
    return Labels((axes,), (axes,), mixed=frozenset((node.attributes.get_int("axis", -1) % rank,)))


def _running_sum(node: ir.Node, context: RuleContext) -> Labels:
    """CumSum, whose axis is an input, a scalar or `[1]`."""
    axes = tuple(range(len(context.shape(node.inputs[0]))))
    axis = context.probe.constant(node.inputs[1])
    if axis is None:
        raise NoRuleError(RefusalCode.COMPUTED_VALUE, "sums along an axis that is computed at run time")
    return Labels((axes, None), (axes,), frozenset((0,)), mixed=frozenset((axis.item() % len(axes),)))


def _normalization(node: ir.Node, context: RuleContext) -> Labels:
    """LayerNormalization and similar operators: all axes from `axis` on are normalized together."""
    inputs, normalized = broadcast(node, context, range(len(node.inputs)))
    start = node.attributes.get_int("axis", -1)
    first = start if start < 0 else start - len(normalized)
    statistics = (*normalized[:first], *(None,) * -first)
    outputs = tuple(normalized if position == 0 else statistics for position in range(len(node.outputs)))
    return Labels(tuple(inputs), outputs, mixed=frozenset(range(first, 0)))


def _skip_normalization(node: ir.Node, context: RuleContext) -> Labels:
    inputs, output = broadcast(node, context, range(len(node.inputs)))
    return Labels(tuple(inputs), tuple(output for _ in node.outputs), mixed=frozenset((-1,)))


def _reduction(node: ir.Node, context: RuleContext) -> Labels:
    rank = len(context.shape(node.inputs[0]))
    axes = node.attributes.get_ints("axes", None) if "axes" in node.attributes else None
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = context.probe.constant(node.inputs[1])
        if constant is None:
            raise NoRuleError(RefusalCode.COMPUTED_VALUE, "reduces axes that are computed at run time")
        axes = constant.reshape(-1).tolist()
    if axes is None or len(axes) == 0:
        axes = () if node.attributes.get_int("noop_with_empty_axes", 0) else tuple(range(rank))
    reduced = {int(axis) % rank for axis in axes}
    keep_axes = node.attributes.get_int("keepdims", 1)
    output = tuple(axis if axis not in reduced else None for axis in range(rank) if keep_axes or axis not in reduced)
    return Labels((tuple(range(rank)), *(None,) * (len(node.inputs) - 1)), (output,), mixed=frozenset(reduced))


_REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"

RULES = {
    ("", "MatMul"): LabelRule(_matmul),
    ("com.microsoft", "FusedMatMul"): LabelRule(_matmul),
    ("", "Gemm"): LabelRule(_gemm),
    ("", "Einsum"): LabelRule(_einsum),
    **{("", op): LabelRule(_along_axis) for op in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")},
    ("", "CumSum"): LabelRule(_running_sum),
    **{
        ("", op): LabelRule(_normalization)
        for op in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
    },
    **{
        ("com.microsoft", op): LabelRule(_skip_normalization)
        for op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
    },
    **{("", f"Reduce{op}"): LabelRule(_reduction) for op in _REDUCTIONS.split()},
}
