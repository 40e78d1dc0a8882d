"""Rules of operators that sum products, where heads begin and end, and of those that mix the indices of an axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.edit import opset
from graph_passes.flow.indices import Need
from graph_passes.flow.node_inference import BATCH_TRANSPOSITIONS
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import Demand, NoRuleError, RuleContext
from graph_passes.flow.rules.labels import AxisLabels, LabelRule, Labels, broadcast
from graph_passes.tape import Tape, input_of


def _batch(operand: ir.Value | None, output: ir.Value, context: RuleContext) -> AxisLabels:
    """Labels of the leading axes of a matrix operand: counted from the end of the output's leading axes."""
    from_last = range(2 - len(context.shape(operand)), 0)
    return tuple(None if context.is_broadcast(operand, label - 2, output, label - 2) else label for label in from_last)


def _matmul(node: ir.Node, context: RuleContext) -> Labels:
    left, right, output = (context.shape(value) for value in (*node.inputs[:2], node.outputs[0]))
    if len(left) < 2 or len(right) < 2:
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, "multiplies by a vector")
    if any(node.attributes.get_int(name, 0) for name in BATCH_TRANSPOSITIONS):
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, "transposes leading axes")
    transposed = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    rows: AxisLabels = ("k", "m") if transposed[0] else ("m", "k")
    columns: AxisLabels = ("n", "k") if transposed[1] else ("k", "n")
    leading = tuple(range(2 - len(output), 0))
    batches = [_batch(operand, node.outputs[0], context) for operand in node.inputs[:2]]
    inputs = ((*batches[0], *rows), (*batches[1], *columns))
    return Labels(inputs, ((*leading, "m", "n"),), frozenset((0, 1)), frozenset(("k",)))


def _gemm(node: ir.Node, context: RuleContext) -> Labels:
    if any(len(context.shape(value)) != 2 for value in node.inputs[:2]):
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, "multiplies tensors that have not two axes")
    labels = _matmul(node, context)
    if (bias := input_of(node, 2)) is None:
        return labels
    output = node.outputs[0]
    axes = range(-len(context.shape(bias)), 0)
    addend = tuple(None if context.is_broadcast(bias, axis, output, axis) else ("m", "n")[axis] for axis in axes)
    return dataclasses.replace(labels, inputs=(*labels.inputs, addend), added=frozenset((2,)))


def _einsum(node: ir.Node, context: RuleContext) -> Labels:
    equation = node.attributes["equation"].as_string().replace(" ", "")
    if "->" not in equation:
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, f"has the equation {equation}, which leaves axes unnamed")
    operands, output = equation.split("->")
    ranks = [len(context.shape(value)) for value in (*node.inputs, node.outputs[0])]
    *terms, output = (_named_axes(*pair) for pair in zip((*operands.split(","), output), ranks, strict=True))
    if any(len(set(term)) < len(term) for term in (*terms, output)):
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, f"takes a diagonal ({equation})")
    summed = frozenset("".join(terms)) - frozenset(output)
    axes = {label: axis for axis, label in enumerate(output)}
    inputs = tuple(
        tuple(
            None if label in axes and context.is_broadcast(value, axis, node.outputs[0], axes[label]) else label
            for axis, label in enumerate(term)
        )
        for value, term in zip(node.inputs, terms, strict=True)
    )
    return Labels(inputs, (tuple(output),), frozenset(range(len(terms))), summed)


def _named_axes(term: str, rank: int) -> str:
    """A term of an equation whose ellipsis is replaced by a digit for each axis, counted from the last one, 0."""
    unnamed = rank - len(term.replace("...", ""))
    return term.replace("...", "".join(str(axis) for axis in reversed(range(unnamed))))


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


def _reduced_axes(node: ir.Node, context: RuleContext) -> frozenset[int]:
    """The axes of the input that a reduction sums, averages, ... over."""
    rank = len(context.shape(node.inputs[0]))
    axes = node.attributes.get_ints("axes", None) if "axes" in node.attributes else None
    if axes is None and (listed := input_of(node, 1)) is not None:
        constant = context.probe.constant(listed)
        if constant is None:
            raise NoRuleError(RefusalCode.COMPUTED_VALUE, "reduces axes that are computed at run time")
        axes = constant.reshape(-1).tolist()
    if axes is None or len(axes) == 0:
        axes = () if node.attributes.get_int("noop_with_empty_axes", 0) else tuple(range(rank))
    return frozenset(int(axis) % rank for axis in axes)


def _reduction(node: ir.Node, context: RuleContext) -> Labels:
    rank, reduced = len(context.shape(node.inputs[0])), _reduced_axes(node, context)
    keep_axes = node.attributes.get_int("keepdims", 1)
    output = tuple(axis if axis not in reduced else None for axis in range(rank) if keep_axes or axis not in reduced)
    return Labels((tuple(range(rank)), *(None,) * (len(node.inputs) - 1)), (output,), mixed=reduced)


def _linear_reduction(node: ir.Node, context: RuleContext) -> Labels:
    """ReduceSum and ReduceMean: indices of the input that are zero contribute nothing."""
    labels = _reduction(node, context)
    return Labels(labels.inputs, labels.outputs, frozenset((0,)), summed=labels.mixed)


def _convolution(node: ir.Node, context: RuleContext) -> Labels:
    """Conv of an image `[row, channel, ...]` with a weight `[channel of the output, channel of a group, ...]`."""
    image, weight = context.shape(node.inputs[0]), context.shape(node.inputs[1])
    groups = _groups(node)
    if groups not in (1, image[1]) or groups not in (1, weight[0]):
        raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, "sums over the channels of each of its groups")
    channel = "in" if groups == 1 else "out"
    axes, unmixed = range(2, len(image)), _unmixed_axes(node, weight)
    kernel = ("out", "in" if groups == 1 else None, *(None for _ in axes))
    return Labels(
        inputs=(("row", channel, *(("pixels", axis) for axis in axes)), kernel, ("out",))[: len(node.inputs)],
        outputs=(("row", "out", *(("pixels", axis) if axis in unmixed else None for axis in axes)),),
        linear=frozenset((0, 1)),
        summed=frozenset(("in",)) if groups == 1 else frozenset(),
        mixed=frozenset(("pixels", axis) for axis in axes if axis not in unmixed),
        added=frozenset((2,)) if input_of(node, 2) is not None else frozenset(),
    )


def _unmixed_axes(node: ir.Node, weight: Sequence[int]) -> set[int]:
    """The axes of the image along which every index of the output depends on the same index of the input alone."""
    sizes = weight[2:]
    strides = node.attributes.get_ints("strides", [1] * len(sizes))
    pads = node.attributes.get_ints("pads", [0] * 2 * len(sizes))
    ends = zip(pads[: len(sizes)], pads[len(sizes) :], strict=True)
    forms = zip(sizes, strides, ends, strict=True)
    return {axis for axis, form in enumerate(forms, start=2) if form == (1, 1, (0, 0))}


def _groups(node: ir.Node) -> int:
    return node.attributes.get_int("group", 1)


class _ConvolutionRule(LabelRule):
    """A label rule whose operator also states the number of groups, which is that of the channels, or one."""

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        channels = demand.outputs[0][1]
        if _groups(node) > 1 and channels is not None:
            node.attributes["group"] = ir.AttrInt64("group", len(channels))


class _SumRule(LabelRule):
    """ReduceSum, whose outputs depend on all indices that are summed over, unless those are zero."""

    def mixes(self, node: ir.Node, position: int, axis: int, context: RuleContext) -> bool:
        return position == 0 and axis in _reduced_axes(node, context)


class _MeanRule(_SumRule):
    """ReduceMean: with fewer indices it is their mean, times the share of the indices that they are."""

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        need, source = demand.inputs[0], node.inputs[0]
        axes, shape = sorted(_reduced_axes(node, context)), context.shape(source)
        cut = [(need[axis], shape[axis]) for axis in axes if need[axis] is not None] if need is not None else []
        if source is None or not cut:
            return
        dtype = (node.outputs[0].dtype or source.dtype or ir.DataType.FLOAT).numpy()
        # Axes that are whole may have any size, so that only the runtime knows the number of all elements.
        kept = math.prod(len(index) / size for index, size in cut if index is not None)
        op, keep_axes = Tape(), node.attributes.get_int("keepdims", 1)
        share = op.constant(np.array(kept, dtype))
        reduction, inputs_since = ("ReduceMean", 18) if kept else ("ReduceSum", 13)  # nothing has a sum, but no mean
        if opset(node) < inputs_since:
            mean = op(reduction, source, keepdims=keep_axes, axes=axes)
        else:
            mean = op(reduction, source, op.ints(axes), keepdims=keep_axes)
        if node.outputs[0].dtype is not None:
            mean.dtype = node.outputs[0].dtype
        op.insert_before(node)
        node.op_type = "Mul"
        node.attributes.clear()
        node.resize_inputs(2)
        for position, factor in enumerate((mean, share)):
            node.replace_input_with(position, factor)


_REDUCTIONS = "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMin ReduceProd"

RULES = {
    ("", "MatMul"): LabelRule(_matmul),
    ("com.microsoft", "FusedMatMul"): LabelRule(_matmul),
    ("", "Gemm"): LabelRule(_gemm),
    ("", "Einsum"): LabelRule(_einsum),
    ("", "Conv"): _ConvolutionRule(_convolution),
    **{("", op): LabelRule(_along_axis) for op in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")},
    ("", "CumSum"): LabelRule(_running_sum),
    **{
        ("", op): LabelRule(_normalization, is_norm=True)
        for op in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
    },
    **{
        ("com.microsoft", op): LabelRule(_skip_normalization)
        for op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
    },
    **{("", op): LabelRule(_reduction) for op in _REDUCTIONS.split()},
    ("", "ReduceSumSquare"): LabelRule(_reduction, is_norm=True),
    ("", "ReduceSum"): _SumRule(_linear_reduction, is_norm=True),
    ("", "ReduceMean"): _MeanRule(_linear_reduction, is_norm=True),
}
