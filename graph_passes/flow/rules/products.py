"""Operators that sum products, and operators that mix an axis: the places where heads begin and end."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.flow.axis_flow import Flow, NoRuleError
from graph_passes.flow.edit import opset
from graph_passes.flow.rules.labels import AxisLabels, LabelRule, Labels, broadcast


def _batch(shape: tuple[int, ...], out: tuple[int, ...], last: int) -> AxisLabels:
    """Labels of the leading axes of one operand: counted from the end of the output's leading axes."""
    leading, target = shape[: len(shape) - last], out[: len(out) - 2]
    return tuple(
        axis - len(leading) if size == target[axis - len(leading)] else None for axis, size in enumerate(leading)
    )


def _matmul(node: ir.Node, flow: Flow) -> Labels:
    a, b, out = flow.shape(node.inputs[0]), flow.shape(node.inputs[1]), flow.shape(node.outputs[0])
    if len(a) < 2 or len(b) < 2:
        raise NoRuleError("multiplies by a vector")
    transposed = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    rows: AxisLabels = ("k", "m") if transposed[0] else ("m", "k")
    columns: AxisLabels = ("n", "k") if transposed[1] else ("k", "n")
    leading = tuple(range(2 - len(out), 0))
    inputs = ((*_batch(a, out, 2), *rows), (*_batch(b, out, 2), *columns))
    return Labels(inputs, ((*leading, "m", "n"),), frozenset((0, 1)), frozenset(("k",)))


def _gemm(node: ir.Node, flow: Flow) -> Labels:
    labels = _matmul(node, flow)
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return labels
    shape, out = flow.shape(node.inputs[2]), flow.shape(node.outputs[0])
    names = ("m", "n")[2 - len(shape) :]
    sizes = out[2 - len(shape) :]
    addend = tuple(name if size == full else None for name, size, full in zip(names, shape, sizes, strict=True))
    return Labels((*labels.inputs, addend), labels.outputs, labels.linear, labels.summed)


def _einsum(node: ir.Node, flow: Flow) -> Labels:
    equation = node.attributes["equation"].as_string().replace(" ", "")
    if "." in equation or "->" not in equation:
        raise NoRuleError(f"has the equation {equation}, which leaves axes unnamed")
    left, out = equation.split("->")
    terms = left.split(",")
    if any(len(set(term)) < len(term) for term in (*terms, out)):
        raise NoRuleError(f"takes a diagonal ({equation})")
    summed = frozenset(left.replace(",", "")) - frozenset(out)
    inputs = tuple(tuple(term) for term in terms)
    return Labels(inputs, (tuple(out),), frozenset(range(len(terms))), summed)


def _along_axis(node: ir.Node, flow: Flow) -> Labels:
    """Softmax and its kin: every output depends on the whole of one axis."""
    rank = len(flow.shape(node.inputs[0]))
    axes = tuple(range(rank))
    if node.op_type != "LpNormalization" and opset(node) < 13:
        # Before opset 13 everything from `axis` on was one axis.
        return Labels((axes,), (axes,), mixed=frozenset(axes[node.attributes.get_int("axis", 1) :]))
    return Labels((axes,), (axes,), mixed=frozenset((node.attributes.get_int("axis", -1) % rank,)))


def _running(node: ir.Node, flow: Flow) -> Labels:
    """CumSum: the axis is an input."""
    axes = tuple(range(len(flow.shape(node.inputs[0]))))
    axis = flow.probe.constant(node.inputs[1])
    if axis is None:
        raise NoRuleError("sums along an axis that is computed at run time")
    return Labels((axes, None), (axes,), frozenset((0,)), mixed=frozenset((int(axis) % len(axes),)))


def _normalization(node: ir.Node, flow: Flow) -> Labels:
    """LayerNormalization and its kin: everything from `axis` on is normalised together."""
    inputs, out = broadcast(node, flow, range(len(node.inputs)))
    start = node.attributes.get_int("axis", -1)
    first = start if start < 0 else start - len(out)
    outputs = tuple(
        out if position == 0 else (*out[:first], *(None,) * -first) for position in range(len(node.outputs))
    )
    return Labels(tuple(inputs), outputs, mixed=frozenset(range(first, 0)))


def _skip_normalization(node: ir.Node, flow: Flow) -> Labels:
    inputs, out = broadcast(node, flow, range(len(node.inputs)))
    return Labels(tuple(inputs), tuple(out for _ in node.outputs), mixed=frozenset((-1,)))


def _reduction(node: ir.Node, flow: Flow) -> Labels:
    rank = len(flow.shape(node.inputs[0]))
    given = node.attributes.get_ints("axes", None) if "axes" in node.attributes else None
    if given is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = flow.probe.constant(node.inputs[1])
        if constant is None:
            raise NoRuleError("reduces axes that are computed at run time")
        given = constant.reshape(-1).tolist()
    if given is None or len(given) == 0:
        given = () if node.attributes.get_int("noop_with_empty_axes", 0) else tuple(range(rank))
    gone = {int(axis) % rank for axis in given}
    kept = node.attributes.get_int("keepdims", 1)
    outputs = tuple(axis if axis not in gone else None for axis in range(rank) if kept or axis not in gone)
    return Labels((tuple(range(rank)), *(None,) * (len(node.inputs) - 1)), (outputs,), mixed=frozenset(gone))


_REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"

RULES = {
    ("", "MatMul"): LabelRule(_matmul),
    ("com.microsoft", "FusedMatMul"): LabelRule(_matmul),
    ("", "Gemm"): LabelRule(_gemm),
    ("", "Einsum"): LabelRule(_einsum),
    **{("", op): LabelRule(_along_axis) for op in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")},
    ("", "CumSum"): LabelRule(_running),
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
