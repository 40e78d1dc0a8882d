"""Operators that take some indices of an axis: slicing, splitting, joining, looking up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.axis_flow import Demand, Flow, Gain, Index, Need, NoRuleError, Rule, same, simplify, union, whole
from graph_passes.flow.edit import cut_value, positions_among, set_ints
from graph_passes.flow.rules.labels import LabelRule, Labels


def _all(index: Index, size: int) -> np.ndarray:
    return np.arange(size) if index is None else index


@dataclasses.dataclass(frozen=True)
class SliceRule:
    """Slice: output position i of an axis is input position start + i * step."""

    selective: bool = True

    def _taken(self, node: ir.Node, flow: Flow) -> dict[int, np.ndarray | None]:
        """Input positions taken along each sliced axis; None where they depend on the input's size."""
        source, shape = node.inputs[0], flow.shape(node.inputs[0])
        starts, ends, axes, steps = _bounds(node, flow)
        taken: dict[int, np.ndarray | None] = {}
        for place, axis in enumerate(int(axis) % len(shape) for axis in axes):
            if starts is not None and ends is not None and steps is not None and flow.probe.fixed(source, axis):
                cut = slice(int(starts[place]), _end(int(ends[place]), int(steps[place])), int(steps[place]))
                taken[axis] = np.arange(shape[axis])[cut]
            else:
                taken[axis] = None
        return taken

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        need = list(outputs[0])
        for axis, taken in self._taken(node, flow).items():
            if taken is None and need[axis] is not None:
                raise NoRuleError("takes indices that are computed at run time")
            if taken is not None:
                size = flow.shape(node.inputs[0])[axis]
                need[axis] = simplify(np.sort(taken[_all(need[axis], len(taken))]), size)
        return Demand((tuple(need), *(None,) * (len(node.inputs) - 1)), tuple(outputs))

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], flow: Flow) -> list[Gain | None]:
        gain = gains[0]
        if gain is None:
            raise NoRuleError("takes its indices from a gate")
        arrays = list(gain.axes)
        for axis, taken in self._taken(node, flow).items():
            array = arrays[axis]
            if array is not None:
                if taken is None:
                    raise NoRuleError("takes indices that are computed at run time")
                arrays[axis] = array[taken]
        return [Gain(tuple(arrays), gain.sites)]

    def mixes(self, node: ir.Node, index: int, axis: int, flow: Flow) -> bool:
        return self._taken(node, flow).get(axis, np.arange(0)) is None

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        """Cut the heads' axes by index before the node, which then takes all of what is left there."""
        source, have = node.inputs[0], held[0]
        assert source is not None
        assert have is not None
        taken = self._taken(node, flow)
        asked = demand.outputs[0]
        cut = {a: t for a, t in taken.items() if t is not None and (have[a] is not None or asked[a] is not None)}
        for axis, positions in cut.items():
            wanted = positions[_all(asked[axis], len(positions))]
            source = cut_value(source, axis, positions_among(wanted, have[axis]), node)
        node.replace_input_with(0, source)
        left = [place for place, axis in enumerate(taken) if axis not in cut]
        if cut and not left:
            node.op_type = "Identity"
            node.resize_inputs(1)
            node.attributes.clear()
        elif cut:
            _slice_only(node, left, list(taken))


def _slice_only(node: ir.Node, left: Sequence[int], axes: Sequence[int]) -> None:
    """Leave out all but some of the axes that a Slice lists."""
    if "starts" in node.attributes:
        listed = {name: node.attributes[name].as_ints() for name in ("starts", "ends")} | {"axes": axes}
        for name, given in listed.items():
            node.attributes[name] = ir.AttrInt64s(name, [given[place] for place in left])
        return
    assert node.graph is not None
    for position in (1, 2, 4):
        value = node.inputs[position] if position < len(node.inputs) else None
        if value is not None:
            node.replace_input_with(position, cut_value(value, 0, np.array(left), node))
    set_ints(node, 3, [axes[place] for place in left])


def _bounds(node: ir.Node, flow: Flow) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray, np.ndarray | None]:
    """(starts, ends, axes, steps) of a Slice, attributes before opset 10 and inputs since; None: computed."""
    if "starts" in node.attributes:
        first, last = (np.array(node.attributes[name].as_ints()) for name in ("starts", "ends"))
        axes = node.attributes.get_ints("axes", tuple(range(len(first))))
        return first, last, np.array(axes), np.ones(len(first), np.int64)
    count = flow.shape(node.inputs[1])[0]
    given = [*node.inputs[1:], None, None][:4]
    starts, ends, axes_, steps = (flow.probe.constant(value) for value in given)
    if axes_ is None:
        if given[2] is not None:
            raise NoRuleError("slices axes that are computed at run time")
        axes_ = np.arange(count)
    return starts, ends, axes_, np.ones(count, np.int64) if given[3] is None else steps


def _end(end: int, step: int) -> int | None:
    """A Python slice's end: beyond the first element when stepping back means no end."""
    return None if step < 0 and end < -(2**31) else end


@dataclasses.dataclass(frozen=True)
class SplitRule:
    """Split: the outputs lie one after the other on an axis of the input."""

    selective: bool = True

    def _axis(self, node: ir.Node, flow: Flow) -> int:
        return node.attributes.get_int("axis", 0) % len(flow.shape(node.inputs[0]))

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        axis = self._axis(node, flow)
        need: list[Index] = []
        for other in range(len(flow.shape(node.inputs[0]))):
            if other == axis:
                parts = [s + _all(out[axis], n) for s, n, out in zip(*self._starts(node, flow), outputs, strict=True)]
                need.append(simplify(np.concatenate(parts), flow.shape(node.inputs[0])[axis]))
                continue
            index = outputs[0][other]
            for out in outputs[1:]:
                index = union(index, out[other])
            need.append(index)
        held = tuple(tuple(out[a] if a == axis else need[a] for a in range(len(need))) for out in outputs)
        return Demand((tuple(need), *(None,) * (len(node.inputs) - 1)), held)

    def _starts(self, node: ir.Node, flow: Flow) -> tuple[list[int], list[int]]:
        axis = self._axis(node, flow)
        if not all(flow.probe.fixed(value, axis) for value in node.outputs):
            raise NoRuleError("splits an axis whose size follows the input")
        sizes = [flow.shape(value)[axis] for value in node.outputs]
        return [sum(sizes[:place]) for place in range(len(sizes))], sizes

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], flow: Flow) -> list[Gain | None]:
        gain, axis = gains[0], self._axis(node, flow)
        if gain is None:
            raise NoRuleError("takes its sizes from a gate")
        results: list[Gain | None] = []
        for start, size in zip(*self._starts(node, flow), strict=True):
            array = gain.axes[axis]
            part = array[start : start + size] if array is not None else None
            results.append(Gain((*gain.axes[:axis], part, *gain.axes[axis + 1 :]), gain.sites))
        return results

    def mixes(self, node: ir.Node, index: int, axis: int, flow: Flow) -> bool:
        return False

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        axis, have, source = self._axis(node, flow), held[0], node.inputs[0]
        assert have is not None
        assert source is not None
        if have[axis] is None and all(out[axis] is None for out in demand.outputs):
            return
        starts, sizes = self._starts(node, flow)
        parts = [s + _all(out[axis], n) for s, n, out in zip(starts, sizes, demand.outputs, strict=True)]
        whole_axis = np.concatenate(parts)
        if not np.array_equal(whole_axis, _all(have[axis], sum(sizes))):
            node.replace_input_with(0, cut_value(source, axis, positions_among(whole_axis, have[axis]), node))
        node.attributes.pop("num_outputs", None)
        if "split" in node.attributes:
            node.attributes["split"] = ir.AttrInt64s("split", [len(part) for part in parts])
        else:
            set_ints(node, 1, [len(part) for part in parts])


@dataclasses.dataclass(frozen=True)
class ConcatRule:
    """Concat: the inputs lie one after the other on an axis of the output."""

    selective: bool = False

    def _axis(self, node: ir.Node, flow: Flow) -> int:
        return node.attributes.get_int("axis", 0) % len(flow.shape(node.outputs[0]))

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        axis, out = self._axis(node, flow), outputs[0]
        needs: list[Need] = []
        start = 0
        for value in node.inputs:
            size = flow.shape(value)[axis]
            part = out[axis]
            if part is not None:
                if value is None or not flow.probe.fixed(value, axis):
                    raise NoRuleError("joins parts whose sizes follow the input on the heads' axis")
                inside = part[(part >= start) & (part < start + size)] - start
                part = simplify(inside, size)
            needs.append((*out[:axis], part, *out[axis + 1 :]))
            start += size
        return Demand(tuple(needs), (out,))

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], flow: Flow) -> list[Gain | None]:
        axis, known = self._axis(node, flow), [gain for gain in gains if gain is not None]
        rank = len(flow.shape(node.outputs[0]))
        arrays: list[np.ndarray | None] = [None] * rank
        for other in range(rank):
            parts = [gain.axes[other] if gain is not None else None for gain in gains]
            if all(part is None for part in parts):
                continue
            if other == axis:
                sizes = [flow.shape(value)[axis] for value in node.inputs]
                filled = [np.ones(n) if part is None else part for part, n in zip(parts, sizes, strict=True)]
                arrays[other] = np.concatenate(filled)
            elif all(same(part, parts[0]) for part in parts):
                arrays[other] = parts[0]
            else:
                raise NoRuleError("joins gated and other tensors")
        return [Gain(tuple(arrays), frozenset().union(*(gain.sites for gain in known)))]

    def mixes(self, node: ir.Node, index: int, axis: int, flow: Flow) -> bool:
        return False

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class GatherRule:
    """Gather: an axis of the table is replaced by the axes of the indices."""

    selective: bool = True

    def _parts(self, node: ir.Node, flow: Flow) -> tuple[int, int, np.ndarray | None]:
        """(axis of the table, rank of the indices, the indices where they are constant)."""
        table, indices = flow.shape(node.inputs[0]), flow.shape(node.inputs[1])
        axis = node.attributes.get_int("axis", 0) % len(table)
        constant = flow.probe.constant(node.inputs[1])
        if constant is not None and (len(indices) > 1 or not flow.probe.fixed(node.inputs[0], axis)):
            constant = None
        return axis, len(indices), None if constant is None else np.asarray(constant) % table[axis]

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        axis, rank, constant = self._parts(node, flow)
        out = outputs[0]
        middle = out[axis : axis + rank]
        taken: Index = None
        indices: Need | None = middle
        if constant is None and any(index is not None for index in middle):
            raise NoRuleError("looks up heads by indices computed at run time")
        if constant is not None:
            # The indices are rewritten with the table, so they are not cut on their own.
            size = flow.shape(node.inputs[0])[axis]
            wanted = constant if not middle or middle[0] is None else constant[middle[0]]
            taken, indices = simplify(np.unique(wanted), size), whole(rank)
        return Demand(((*out[:axis], taken, *out[axis + rank :]), indices), (out,))

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], flow: Flow) -> list[Gain | None]:
        axis, rank, constant = self._parts(node, flow)
        gain = gains[0]
        if gain is None or gains[1] is not None:
            raise NoRuleError("looks up by a gated tensor")
        array = gain.axes[axis]
        middle: tuple[np.ndarray | None, ...] = (None,) * rank
        if array is not None:
            if constant is None or rank != 1:
                raise NoRuleError("looks up heads by indices computed at run time")
            middle = (array[constant],)
        return [Gain((*gain.axes[:axis], *middle, *gain.axes[axis + 1 :]), gain.sites)]

    def mixes(self, node: ir.Node, index: int, axis: int, flow: Flow) -> bool:
        at, _, constant = self._parts(node, flow)
        return index == 0 and axis == at and constant is None

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        axis, rank, constant = self._parts(node, flow)
        if constant is None:
            return
        middle = demand.outputs[0][axis : axis + rank]
        wanted = constant if not middle or middle[0] is None else constant[middle[0]]
        have = held[0]
        assert have is not None
        positions = np.asarray(positions_among(wanted, have[axis]))
        if not np.array_equal(positions, constant):
            set_ints(node, 1, positions)


def _triangle(node: ir.Node, flow: Flow) -> Labels:
    """Trilu and the like: the last two axes are masked, the leading ones pass."""
    axes = tuple(range(len(flow.shape(node.inputs[0]))))
    return Labels((axes, None), (axes,), frozenset((0,)), mixed=frozenset(axes[-2:]))


RULES: dict[tuple[str, str], Rule] = {
    ("", "Slice"): SliceRule(),
    ("", "Split"): SplitRule(),
    ("", "Concat"): ConcatRule(),
    ("", "Gather"): GatherRule(),
    ("", "Trilu"): LabelRule(_triangle),
}
