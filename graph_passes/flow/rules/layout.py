"""Operators that move elements without changing them: transposing, adding and removing axes, repeating, padding."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.edit import set_ints
from graph_passes.flow.indices import Need, part_of_each_row
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import Demand, Gain, NoRuleError, Rule, RuleContext
from graph_passes.flow.rules.labels import LabelRule, Labels, broadcast
from graph_passes.flow.shape_inputs import ShapeInput, same_size
from graph_passes.tape import Tape, input_of, shape_axes


def _transpose(node: ir.Node, context: RuleContext) -> Labels:
    rank = len(context.shape(node.inputs[0]))
    order = node.attributes.get_ints("perm", tuple(reversed(range(rank))))
    return Labels((tuple(range(rank)),), (tuple(order),), frozenset((0,)))


def _listed_axes(node: ir.Node, context: RuleContext) -> list[int] | None:
    """The axis list of Squeeze and Unsqueeze: an attribute before opset 13, an input since; None: there is none."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    if (axes := input_of(node, 1)) is None:
        return None
    constant = context.probe.constant(axes)
    if constant is None:
        raise NoRuleError(RefusalCode.COMPUTED_VALUE, "has axes that are computed at run time")
    return [int(axis) for axis in constant.reshape(-1)]


def _unsqueeze(node: ir.Node, context: RuleContext) -> Labels:
    rank = len(context.shape(node.outputs[0]))
    new = {axis % rank for axis in _listed_axes(node, context) or ()}
    labels = iter(range(rank))
    output = tuple(None if axis in new else next(labels) for axis in range(rank))
    return Labels((tuple(range(rank - len(new))), None), (output,), frozenset((0,)))


def _squeeze(node: ir.Node, context: RuleContext) -> Labels:
    shape = context.shape(node.inputs[0])
    listed = _listed_axes(node, context)
    if listed is None:
        removed = {axis for axis, size in enumerate(shape) if size == 1 and context.probe.fixed(node.inputs[0], axis)}
    else:
        removed = {axis % len(shape) for axis in listed}
    labels = tuple(None if axis in removed else axis for axis in range(len(shape)))
    return Labels((labels, None), (tuple(label for label in labels if label is not None),), frozenset((0,)))


class SqueezeRule(LabelRule):
    """A label rule whose operator may list no axes: it then removes all of one element, that of a single unit too."""

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        demand = super().demand(node, outputs, context)
        is_single = any(index is not None and len(index) == 1 for index in demand.outputs[0])
        if is_single and _listed_axes(node, context) is None:
            why = "lists no axes, and would remove that of a single unit"
            raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, why)
        return demand


def _expand(node: ir.Node, context: RuleContext) -> Labels:
    inputs, output = broadcast(node, context, (0,))
    return Labels(tuple(inputs), (output,), frozenset((0,)))


def _constant_of_shape(node: ir.Node, context: RuleContext) -> Labels:
    return Labels((None,), (tuple(range(len(context.shape(node.outputs[0])))),))


def _pad(node: ir.Node, context: RuleContext) -> Labels:
    """Pad: only the padded axes change. Zeros of the other axes stay zero if zeros are added."""
    rank = len(context.shape(node.inputs[0]))
    value = input_of(node, 2)
    added = node.attributes.get_float("value", 0.0) if value is None else context.probe.constant(value)
    axes = tuple(range(rank))
    linear = frozenset((0,) if added == 0 else ())
    return Labels(
        (axes, *(None,) * (len(node.inputs) - 1)), (axes,), linear, mixed=frozenset(_padded_axes(node, context))
    )


def _padded_axes(node: ir.Node, context: RuleContext) -> set[int]:
    """Axes that are padded for inputs of some sizes. One of fixed size that neither walk pads is never padded."""
    rank = len(context.shape(node.inputs[0]))
    sizes = input_of(node, 1)
    is_computed = sizes is not None and sizes.const_value is None
    first, second = context.probe.contents(sizes)
    if "pads" in node.attributes:
        first = second = np.array(node.attributes["pads"].as_ints())
    if first is None or second is None or len(node.inputs) > 3:
        raise NoRuleError(RefusalCode.COMPUTED_VALUE, "pads by sizes that are computed at run time")
    is_padded = np.logical_or(first, second).reshape(2, rank).any(axis=0)
    return {
        axis
        for axis in range(rank)
        if is_padded[axis] or (is_computed and not context.probe.fixed(node.inputs[0], axis))
    }


def _tile(node: ir.Node, context: RuleContext) -> Labels:
    """Tile: an axis of one element is repeated like a broadcast; a longer one that is repeated has two labels."""
    rank = len(context.shape(node.inputs[0]))
    before, after = context.probe.shapes(node.inputs[0]), context.probe.shapes(node.outputs[0])
    axes = tuple(axis if same_size(before, after, axis, axis) else None for axis in range(rank))
    return Labels((axes, None), (tuple(range(rank)),), frozenset((0,)))


class TileRule(LabelRule):
    """A label rule whose operator also reads how often to repeat each axis.

    An axis of several elements that is repeated holds rows of them, one after the other: every row has to need the same
    elements.
    """

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        demand = super().demand(node, outputs, context)
        if self._fewer_repeats(node, demand, context) and context.probe.constant(node.inputs[1]) is None:
            raise NoRuleError(RefusalCode.COMPUTED_VALUE, "repeats by numbers that are computed at run time")
        need = list(demand.inputs[0] or ())
        before, after = context.shape(node.inputs[0]), context.shape(node.outputs[0])
        single = _single_axes(node.inputs[0], context)
        for axis, index in enumerate(demand.outputs[0]):
            if index is None or axis in single or need[axis] is not None:
                continue
            if before[axis] == after[axis] or not context.probe.fixed(node.inputs[0], axis):
                raise NoRuleError(RefusalCode.FREE_SIZE, "repeats an axis whose size depends on the inputs")
            need[axis] = part_of_each_row(index, after[axis], after[axis] // before[axis])
            if need[axis] is None:
                raise NoRuleError(RefusalCode.MIXES_HEADS, "repeats elements of which not all copies are dropped")
        return Demand((tuple(need), None), demand.outputs)

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        gain = gains[0]
        if gain is None:
            raise NoRuleError(RefusalCode.NOT_LINEAR, "reads its numbers of repeats from a gate")
        sizes = zip(context.shape(node.inputs[0]), context.shape(node.outputs[0]), strict=True)
        pairs = zip(gain.axes, (after // max(before, 1) for before, after in sizes), strict=True)
        return [Gain(tuple(None if array is None else np.tile(array, count) for array, count in pairs), gain.sites)]

    def _fewer_repeats(self, node: ir.Node, demand: Demand, context: RuleContext) -> dict[int, int]:
        """Axis -> new number of repeats, for each axis that is repeated less often than before."""
        single, need = _single_axes(node.inputs[0], context), demand.outputs[0]
        return {axis: len(index) for axis, index in enumerate(need) if index is not None and axis in single}

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        fewer, repeats = self._fewer_repeats(node, demand, context), context.probe.constant(node.inputs[1])
        if fewer and repeats is not None:
            set_ints(node, 1, [fewer.get(axis, int(number)) for axis, number in enumerate(repeats)])


def _single_axes(value: ir.Value | None, context: RuleContext) -> set[int]:
    """The axes of one element, whatever the sizes of the graph's inputs."""
    return {axis for axis, size in enumerate(context.shape(value)) if size == 1 and context.probe.fixed(value, axis)}


class ShapedRule(LabelRule):
    """A label rule whose operator also reads the shape of its output: Expand and ConstantOfShape."""

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        demand = super().demand(node, outputs, context)
        ShapeInput(node, demand.outputs[0], demand.inputs[0] or (), context).check()
        return demand

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        ShapeInput(node, demand.outputs[0], demand.inputs[0] or (), context).write()


class ShapeRule(Rule):
    """Shape: it reads no content. After a cut it still returns the sizes of the unpruned tensor."""

    def selected_axes(self, node: ir.Node, context: RuleContext) -> Collection[int]:
        return range(len(context.shape(node.inputs[0])))

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        return Demand((None,), tuple(outputs))

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        return [None]

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        source, need = node.inputs[0], held[0]
        if need is None or source is None or node.graph is None:
            return
        op, shape, parts = Tape(), context.shape(source), list[ir.Value]()
        for axis in shape_axes(node, len(shape)):
            index, fixed = need[axis], context.probe.fixed(source, axis)
            part = op.size(source, axis) if index is None or not fixed else op.ints([shape[axis]])
            if index is not None and not fixed:
                # Batch and heads share this axis: the unpruned axis is longer in proportion to the number of heads.
                before, after = op.ints([shape[axis]]), op.ints([len(index)])
                part = op("Div", op("Mul", part, before), after)
            parts.append(part)
        joined = op("Concat", *parts, axis=0)
        op.insert_before(node)
        node.op_type = "Identity"
        node.attributes.clear()
        node.replace_input_with(0, joined)


RULES: dict[tuple[str, str], Rule] = {
    ("", "Transpose"): LabelRule(_transpose),
    ("", "Unsqueeze"): LabelRule(_unsqueeze),
    ("", "Squeeze"): SqueezeRule(_squeeze),
    ("", "Expand"): ShapedRule(_expand),
    ("", "ConstantOfShape"): ShapedRule(_constant_of_shape),
    ("", "Pad"): LabelRule(_pad),
    ("", "Tile"): TileRule(_tile),
    ("", "Shape"): ShapeRule(),
}
