"""Reshape and Flatten: axes are merged and split, so the indices of the heads are regrouped.

If an `Expand` repeats key/value heads for their query heads, the copies are interchangeable: as many are computed as
query heads remain, whichever these are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Shape
from graph_passes.flow.indices import Index, Need, all_indices, simplify
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import Demand, Gain, NoRuleError, Rule, RuleContext
from graph_passes.flow.shape_inputs import ShapeInput
from graph_passes.tape import producer_of


def axis_groups(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """Divide a reshape into parts that merge and split axes among themselves, as (input axes, output axes).

    Elements keep their row-major order, so the parts end wherever the products of the leading sizes agree. Axes of one
    element join the part before them.

    Raises:
        NoRuleError: the shapes have different numbers of elements.
    """
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        start = (i, j)
        inputs = outputs = 1  # products of the sizes in this part
        if i < len(before) and j < len(after):
            inputs, outputs, i, j = before[i], after[j], i + 1, j + 1
        while inputs != outputs or (not i < len(before)) != (not j < len(after)):
            if i < len(before) and (inputs < outputs or (inputs == outputs and before[i] == 1)):
                inputs, i = inputs * before[i], i + 1
            elif j < len(after) and (inputs > outputs or (inputs == outputs and after[j] == 1)):
                outputs, j = outputs * after[j], j + 1
            else:
                break
        if start == (i, j):
            why = f"turns {before} into {after}, which have different numbers of elements"
            raise NoRuleError(RefusalCode.UNSUPPORTED_FORM, why)
        groups.append((range(start[0], i), range(start[1], j)))
    return groups


class ReshapeRule(Rule):
    """Reshape and Flatten: needed indices are regrouped, and extended to a box where they do not form one."""

    def _groups(self, node: ir.Node, context: RuleContext) -> list[tuple[range, range]]:
        for value in (node.inputs[0], node.outputs[0]):
            context.shape(value)  # raises the error of an unknown shape
        walks = list(zip(context.probe.shapes(node.inputs[0]), context.probe.shapes(node.outputs[0]), strict=True))
        for before, after in walks:
            # Sizes of one do not tell which axes belong together; those of the other walk may.
            groups = axis_groups(before, after) if before is not None and after is not None else None
            if groups is not None and all(_fits(groups, *shapes) for shapes in walks):
                return groups
        raise NoRuleError(RefusalCode.FREE_SIZE, "regroups axes differently for inputs of other sizes")

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        before, after = context.shape(node.inputs[0]), context.shape(node.outputs[0])
        need, held = list(all_indices(len(before))), list(outputs[0])
        for ins, outs in self._groups(node, context):
            part = [held[axis] for axis in outs]
            sides, kept = _regrouped(part, _sizes(before, ins), _sizes(after, outs), _repeated_axis(node, ins, context))
            for axis, index in zip(ins, sides, strict=True):
                need[axis] = index
            for axis, index in zip(outs, kept, strict=True):
                held[axis] = index
        self._check_shape_input(node, tuple(need), tuple(held), context)
        return Demand((tuple(need), None), (tuple(held),))

    def _check_shape_input(self, node: ir.Node, source: Need, output: Need, context: RuleContext) -> None:
        if node.op_type == "Reshape":
            ShapeInput(node, output, source, context).check()

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        gain = gains[0]
        if gain is None:
            raise NoRuleError(RefusalCode.NOT_LINEAR, "reads its shape from a gate")
        before, after = context.shape(node.inputs[0]), context.shape(node.outputs[0])
        arrays: list[np.ndarray | None] = [None] * len(after)
        for ins, outs in self._groups(node, context):
            if all(gain.axes[axis] is None for axis in ins):
                continue
            box = _outer([gain.axes[axis] for axis in ins], _sizes(before, ins)).reshape(_sizes(after, outs))
            uniform = (box == box.flat[0]).all()
            for position, axis in enumerate(outs):
                # The factors of an axis are the box seen along it, if the box does not change along the other axes.
                along = np.moveaxis(box, position, 0).reshape(box.shape[position], -1)
                if (along == along[:, :1]).all() and not uniform:
                    arrays[axis] = along[:, 0]
            if not np.array_equal(_outer([arrays[axis] for axis in outs], _sizes(after, outs)), box):
                if not uniform:
                    raise NoRuleError(RefusalCode.INSEPARABLE_HEADS, "splits the heads over several axes")
                arrays[outs[-1]] = np.full(after[outs[-1]], box.flat[0])
        return [Gain(tuple(arrays), gain.sites)]

    def carries(self, node: ir.Node, position: int, axis: int, context: RuleContext) -> Iterator[tuple[int, int]]:
        if position != 0:
            return
        before, after = context.shape(node.inputs[0]), context.shape(node.outputs[0])
        ins, outs = next(group for group in self._groups(node, context) if axis in group[0])
        for output_axis in outs:
            first: Need = tuple(np.zeros(1, np.int64) if index == output_axis else None for index in outs)
            try:
                sides, kept = _regrouped(first, _sizes(before, ins), _sizes(after, outs))
                self._check_shape_input(
                    node, _around(ins, sides, len(before)), _around(outs, kept, len(after)), context
                )
            except NoRuleError:  # an axis whose size cannot be written is never cut
                continue
            if sides[axis - ins.start] is not None:
                yield 0, output_axis

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        if node.op_type == "Reshape":
            ShapeInput(node, demand.outputs[0], demand.inputs[0] or (), context).write()


def _around(axes: range, part: Sequence[Index], rank: int) -> Need:
    """The need of a tensor of which all axes but some are needed entirely."""
    return (*all_indices(axes.start), *part, *all_indices(rank - axes.stop))


def _fits(groups: Sequence[tuple[range, range]], before: Shape | None, after: Shape | None) -> bool:
    """Whether the parts of a reshape have as many elements in a tensor as in another; false if a shape is unknown."""
    return (
        before is not None
        and after is not None
        and all(math.prod(_sizes(before, ins)) == math.prod(_sizes(after, outs)) for ins, outs in groups)
    )


def _sizes(shape: Shape, axes: range) -> Shape:
    return shape[axes.start : axes.stop]


def _repeated_axis(node: ir.Node, axes: range, context: RuleContext) -> int | None:
    """The position among input axes of the one along which an `Expand` repeats one element; None: there is none."""
    producer = producer_of(node.inputs[0])
    if producer is None or producer.op_type != "Expand":
        return None
    source, expanded = producer.inputs[0], node.inputs[0]
    added = len(context.shape(expanded)) - len(context.shape(source))
    repeated = [axis for axis in axes if axis < added or context.is_broadcast(source, axis - added, expanded, axis)]
    if len(repeated) != 1 or (repeated[0] >= added and not context.probe.fixed(source, repeated[0] - added)):
        return None
    return repeated[0] - axes.start


def _regrouped(
    need: Sequence[Index], before: Shape, after: Shape, repeated: int | None = None
) -> tuple[Sequence[Index], Sequence[Index]]:
    """What the input of one part of a reshape must hold, and what its output then holds.

    `repeated` is the input axis whose indices are all alike, if there is one.
    """
    if all(index is None for index in need):
        return all_indices(len(before)), need
    if len(before) == len(after) == 1:
        return need, need
    if repeated is not None and (copies := _any_copies(_box(need, after).reshape(before), repeated)) is not None:
        return copies, need
    sides = _sides(_box(need, after).reshape(before))
    box = _box(sides, before).reshape(after)
    kept = _sides(box)
    if not np.array_equal(_box(kept, after), box):
        raise NoRuleError(
            RefusalCode.INSEPARABLE_HEADS, "splits the heads over axes from which single heads cannot be removed"
        )
    return sides, kept


def _any_copies(needed: np.ndarray, axis: int) -> Sequence[Index] | None:
    """The first copies of each entry along an axis of copies, as many as are needed, if they form a box.

    None if they do not, or if the copies would not be in the order of those that are needed.
    """
    positions = np.arange(needed.shape[axis]).reshape([-1 if index == axis else 1 for index in range(needed.ndim)])
    first = positions < needed.sum(axis, keepdims=True)
    sides = _sides(first)
    entries = np.broadcast_to(np.arange(needed.size).reshape(needed.shape).take([0], axis), needed.shape)
    in_order = np.array_equal(entries[needed], entries[first])
    return sides if in_order and np.array_equal(_box(sides, needed.shape), first) else None


def _outer(factors: Sequence[np.ndarray | None], sizes: Sequence[int]) -> np.ndarray:
    """Outer product of the factors of each axis (None: ones)."""
    product = np.ones(())
    for factor, size in zip(factors, sizes, strict=True):
        product = np.multiply.outer(product, np.ones(size) if factor is None else factor)
    return product


def _box(sides: Sequence[Index], sizes: Sequence[int]) -> np.ndarray:
    """Boolean array that is true where the position on every axis is in that axis's index."""
    pairs = zip(sides, sizes, strict=True)
    return _outer([None if side is None else np.isin(np.arange(size), side) for side, size in pairs], sizes) != 0


def _sides(box: np.ndarray) -> list[Index]:
    """The smallest index of each axis such that together they cover every true entry."""
    rank = box.ndim
    return [
        simplify(np.flatnonzero(box.any(axis=tuple(a for a in range(rank) if a != axis))), box.shape[axis])
        for axis in range(rank)
    ]


RULES: dict[tuple[str, str], Rule] = {("", "Reshape"): ReshapeRule(), ("", "Flatten"): ReshapeRule()}
