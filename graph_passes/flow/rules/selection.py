"""Operators that divide, join, look up or write indices of an axis: Split, Concat, Gather, ScatterND and similar."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.edit import cut_value, opset, positions_among, set_ints
from graph_passes.flow.indices import Index, Need, all_indices, positions_of, same_index, simplify, union
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import Demand, Gain, NoRuleError, Rule, RuleContext
from graph_passes.flow.rules.labels import AxisLabels, LabelRule, Labels


class SplitRule(Rule):
    """Split: the outputs follow one another along an axis of the input."""

    def selected_axes(self, node: ir.Node, context: RuleContext) -> Collection[int]:
        return (self._axis(node, context),)

    def _axis(self, node: ir.Node, context: RuleContext) -> int:
        return node.attributes.get_int("axis", 0) % len(context.shape(node.inputs[0]))

    def _parts(self, node: ir.Node, context: RuleContext) -> tuple[list[int], list[int]]:
        """(first positions, sizes) of the outputs on the split axis."""
        axis = self._axis(node, context)
        if not all(context.probe.fixed(value, axis) for value in node.outputs):
            raise NoRuleError(RefusalCode.FREE_SIZE, "splits an axis whose size depends on the graph's inputs")
        sizes = [context.shape(value)[axis] for value in node.outputs]
        return [sum(sizes[:part]) for part in range(len(sizes))], sizes

    def _keeps_axis(self, node: ir.Node, needs: Sequence[Need], context: RuleContext) -> bool:
        """Whether everything on the split axis is needed; its size may then depend on the graph's inputs."""
        axis = self._axis(node, context)
        return all(need[axis] is None for need in needs)

    def _joined(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> np.ndarray:
        """The positions of the split axis that the outputs need, in the order of the outputs."""
        axis, (starts, sizes) = self._axis(node, context), self._parts(node, context)
        return np.concatenate(
            [start + positions_of(need[axis], size) for start, size, need in zip(starts, sizes, outputs, strict=True)]
        )

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        split_axis = self._axis(node, context)
        need: list[Index] = []
        for axis, size in enumerate(context.shape(node.inputs[0])):
            if axis == split_axis:
                is_whole = self._keeps_axis(node, outputs, context)
                need.append(None if is_whole else simplify(self._joined(node, outputs, context), size))
                continue
            index = outputs[0][axis]
            for output in outputs[1:]:
                index = union(index, output[axis])
            need.append(index)
        held = tuple(
            tuple(output[axis] if axis == split_axis else need[axis] for axis in range(len(need))) for output in outputs
        )
        return Demand((tuple(need), *(None,) * (len(node.inputs) - 1)), held)

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        gain, axis = gains[0], self._axis(node, context)
        if gain is None:
            raise NoRuleError(RefusalCode.NOT_LINEAR, "reads its sizes from a gate")
        array, results = gain.axes[axis], list[Gain | None]()
        if array is None:
            return [gain for _ in node.outputs]
        for start, size in zip(*self._parts(node, context), strict=True):
            part = array[start : start + size]
            results.append(Gain((*gain.axes[:axis], part, *gain.axes[axis + 1 :]), gain.sites))
        return results

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        axis, held_axes, source = self._axis(node, context), held[0], node.inputs[0]
        assert held_axes is not None
        assert source is not None
        if self._keeps_axis(node, [held_axes, *demand.outputs], context):
            return
        _, sizes = self._parts(node, context)
        joined = self._joined(node, demand.outputs, context)
        if not np.array_equal(joined, positions_of(held_axes[axis], sum(sizes))):
            node.replace_input_with(0, cut_value(source, axis, positions_among(joined, held_axes[axis]), node))
        lengths = [len(positions_of(need[axis], size)) for need, size in zip(demand.outputs, sizes, strict=True)]
        node.attributes.pop("num_outputs", None)
        if "split" in node.attributes or opset(node) < 13:
            node.attributes["split"] = ir.AttrInt64s("split", lengths)
        else:
            set_ints(node, 1, lengths)


class ConcatRule(Rule):
    """Concat: the inputs follow one another along an axis of the output."""

    def continued(self, node: ir.Node) -> Iterable[tuple[int, int]]:
        yield 0, 0

    def _axis(self, node: ir.Node, context: RuleContext) -> int:
        return node.attributes.get_int("axis", 0) % len(context.shape(node.outputs[0]))

    def _sizes(self, node: ir.Node, context: RuleContext) -> list[int]:
        """Sizes of the inputs on the joined axis."""
        axis = self._axis(node, context)
        return [context.shape(value)[axis] for value in node.inputs]

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        axis, output = self._axis(node, context), outputs[0]
        index = output[axis]
        needs: list[Need] = []
        start = 0
        for value, size in zip(node.inputs, self._sizes(node, context), strict=True):
            part = index
            if index is not None:
                if value is None or not context.probe.fixed(value, axis):
                    why = "joins parts whose sizes depend on the graph's inputs on the heads' axis"
                    raise NoRuleError(RefusalCode.FREE_SIZE, why)
                part = simplify(index[(index >= start) & (index < start + size)] - start, size)
            needs.append((*output[:axis], part, *output[axis + 1 :]))
            start += size
        return Demand(tuple(needs), (output,))

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        joined_axis = self._axis(node, context)
        arrays: list[np.ndarray | None] = []
        for axis in range(len(context.shape(node.outputs[0]))):
            parts = [gain.axes[axis] if gain is not None else None for gain in gains]
            if all(part is None for part in parts):
                arrays.append(None)
            elif axis == joined_axis:
                sizes = self._sizes(node, context)
                filled = [np.ones(size) if part is None else part for part, size in zip(parts, sizes, strict=True)]
                arrays.append(np.concatenate(filled))
            elif all(same_index(part, parts[0]) for part in parts):
                arrays.append(parts[0])
            else:
                raise NoRuleError(RefusalCode.NOT_LINEAR, "joins gated tensors with ungated ones")
        return [Gain(tuple(arrays), frozenset().union(*(gain.sites for gain in gains if gain is not None)))]

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        """Join only the inputs of which something is needed; where nothing is needed of any, join all of them."""
        axis = self._axis(node, context)
        joined = [value for value, need in zip(node.inputs, held, strict=True) if not _is_empty(need, axis)]
        if not 0 < len(joined) < len(node.inputs):
            return
        node.resize_inputs(len(joined))
        for position, value in enumerate(joined):
            node.replace_input_with(position, value)
        if len(joined) == 1:
            node.op_type = "Identity"
            node.attributes.clear()


def _is_empty(need: Need | None, axis: int) -> bool:
    """Whether a need has no index of an axis."""
    index = None if need is None else need[axis]
    return index is not None and len(index) == 0


class GatherRule(Rule):
    """Gather: an axis of the table is replaced by the axes of the indices."""

    def selected_axes(self, node: ir.Node, context: RuleContext) -> Collection[int]:
        return self._lookup(node, context)[:1]

    def _lookup(self, node: ir.Node, context: RuleContext) -> tuple[int, int, np.ndarray | None]:
        """(axis of the table, rank of the indices, the indices where they are constant)."""
        table, indices = context.shape(node.inputs[0]), context.shape(node.inputs[1])
        axis = node.attributes.get_int("axis", 0) % len(table)
        constant = context.probe.constant(node.inputs[1])
        if constant is not None and (len(indices) > 1 or not context.probe.fixed(node.inputs[0], axis)):
            constant = None
        return axis, len(indices), None if constant is None else np.asarray(constant) % table[axis]

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        axis, rank, constant = self._lookup(node, context)
        output = outputs[0]
        index_need = output[axis : axis + rank]
        table_index: Index = None
        if constant is None and any(index is not None for index in index_need):
            raise _computed_indices()
        if constant is not None:
            # `rewrite` writes new indices with the table, so the need of the old ones is everything.
            size = context.shape(node.inputs[0])[axis]
            table_index = simplify(np.unique(_selected(constant, index_need)), size)
            index_need = all_indices(rank)
        return Demand(((*output[:axis], table_index, *output[axis + rank :]), index_need), (output,))

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        axis, rank, constant = self._lookup(node, context)
        gain = gains[0]
        if gain is None or gains[1] is not None:
            raise NoRuleError(RefusalCode.NOT_LINEAR, "looks up by a gated tensor")
        array = gain.axes[axis]
        looked_up: tuple[np.ndarray | None, ...] = (None,) * rank
        if array is not None:
            if constant is None or rank != 1:
                raise _computed_indices()
            looked_up = (array[constant],)
        return [Gain((*gain.axes[:axis], *looked_up, *gain.axes[axis + 1 :]), gain.sites)]

    def mixes(self, node: ir.Node, position: int, axis: int, context: RuleContext) -> bool:
        table_axis, _, constant = self._lookup(node, context)
        return position == 0 and axis == table_axis and constant is None

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        axis, rank, constant = self._lookup(node, context)
        if constant is None:
            return
        indices = _selected(constant, demand.outputs[0][axis : axis + rank])
        held_axes = held[0]
        assert held_axes is not None
        positions = np.asarray(positions_among(indices, held_axes[axis]))
        stored = context.probe.constant(node.inputs[1])  # may count from the end of an axis, which is shorter now
        if stored is None or not np.array_equal(positions, stored):
            set_ints(node, 1, positions)


def _selected(indices: np.ndarray, need: Need) -> np.ndarray:
    """The indices, a scalar or `[n]`, that a part of the output needs."""
    return indices if not need or need[0] is None else indices[need[0]]


def _computed_indices() -> NoRuleError:
    return NoRuleError(RefusalCode.COMPUTED_VALUE, "looks up heads by indices that are computed at run time")


def _triangle(node: ir.Node, context: RuleContext) -> Labels:
    """Trilu: the last two axes are masked, the leading ones are passed on."""
    axes = tuple(range(len(context.shape(node.inputs[0]))))
    return Labels((axes, None), (axes,), frozenset((0,)), mixed=frozenset(axes[-2:]))


def _scatter(node: ir.Node, context: RuleContext) -> Labels:
    """ScatterND: the leading axes of the data are written by index, the others are passed on."""
    data, indices, updates = (context.shape(value) for value in node.inputs[:3])
    axes, depth = tuple(range(len(data))), indices[-1]
    written = (*(None,) * (len(updates) - len(axes[depth:])), *axes[depth:])
    return Labels((axes, (None,) * len(indices), written), (axes,), mixed=frozenset(axes[:depth]))


def _elements(node: ir.Node, context: RuleContext) -> Labels:
    """GatherElements: each output element comes from the same position of the table on every axis but one.

    The indices have the shape of the output, and may cover only a part of the other axes of the table.
    """
    table, output = node.inputs[0], node.outputs[0]
    looked_up = node.attributes.get_int("axis", 0) % len(context.shape(table))
    axes = tuple(range(len(context.shape(output))))
    of_table: AxisLabels = tuple(
        "looked up" if axis == looked_up else None if context.is_broadcast(table, axis, output, axis) else axis
        for axis in axes
    )
    return Labels((of_table, axes), (axes,), frozenset((0,)), mixed=frozenset(("looked up",)))


def _slices(node: ir.Node, context: RuleContext) -> Labels:
    """GatherND: the last axis of the indices holds positions on the axes of the table that follow the batch axes."""
    table, indices = context.shape(node.inputs[0]), context.shape(node.inputs[1])
    batch = node.attributes.get_int("batch_dims", 0)
    shared = tuple(("batch", axis) for axis in range(batch))
    positions = tuple(("index", axis) for axis in range(batch, len(indices) - 1))
    looked_up = tuple(("looked up", axis) for axis in range(batch, batch + indices[-1]))
    rest = tuple(("table", axis) for axis in range(batch + indices[-1], len(table)))
    inputs = ((*shared, *looked_up, *rest), (*shared, *positions, None))
    return Labels(inputs, ((*shared, *positions, *rest),), frozenset((0,)), mixed=frozenset(looked_up))


def _points(node: ir.Node, context: RuleContext) -> Labels:
    """GridSample: rows and channels stay separate, and each point mixes the pixels around it.

    Deformable attention samples the values `[row * head, width, ...]` at points `[row * head, ..., 2]`.
    """
    rank = len(context.shape(node.inputs[0]))
    pixels = tuple(("pixels", axis) for axis in range(2, rank))
    points = tuple(("points", axis) for axis in range(2, rank))
    inputs = (("row", "channel", *pixels), ("row", *points, "coordinates"))
    return Labels(inputs, (("row", "channel", *points),), frozenset((0,)), mixed=frozenset((*pixels, "coordinates")))


RULES: dict[tuple[str, str], Rule] = {
    ("", "Split"): SplitRule(),
    ("", "Concat"): ConcatRule(),
    ("", "Gather"): GatherRule(),
    ("", "GatherElements"): LabelRule(_elements),
    ("", "GatherND"): LabelRule(_slices),
    ("", "GridSample"): LabelRule(_points),
    ("", "ScatterND"): LabelRule(_scatter),
    ("", "Trilu"): LabelRule(_triangle),
}
