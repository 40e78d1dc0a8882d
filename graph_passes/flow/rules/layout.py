"""Operators that move elements without changing them: transposing, adding and removing axes, repeating, reshaping."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.axis_flow import Demand, Flow, Gain, Index, Need, NoRuleError, Rule, simplify, whole
from graph_passes.flow.concrete_shapes import Shape
from graph_passes.flow.edit import ints, set_ints
from graph_passes.flow.rules.labels import LabelRule, Labels, broadcast
from graph_passes.flow.shape_inputs import check_shape_input, set_shape_input


def _transpose(node: ir.Node, flow: Flow) -> Labels:
    rank = len(flow.shape(node.inputs[0]))
    order = node.attributes.get_ints("perm", tuple(reversed(range(rank))))
    return Labels((tuple(range(rank)),), (tuple(order),), frozenset((0,)))


def _axes(node: ir.Node, flow: Flow) -> list[int] | None:
    """The axis list of Squeeze and Unsqueeze, an attribute before opset 13 and an input since."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    constant = flow.probe.constant(node.inputs[1])
    if constant is None:
        raise NoRuleError("has axes that are computed at run time")
    return [int(axis) for axis in constant.reshape(-1)]


def _unsqueeze(node: ir.Node, flow: Flow) -> Labels:
    rank = len(flow.shape(node.outputs[0]))
    new = {axis % rank for axis in _axes(node, flow) or ()}
    labels = iter(range(rank))
    outputs = tuple(None if axis in new else next(labels) for axis in range(rank))
    return Labels((tuple(range(rank - len(new))), None), (outputs,), frozenset((0,)))


def _squeeze(node: ir.Node, flow: Flow) -> Labels:
    shape = flow.shape(node.inputs[0])
    given = _axes(node, flow)
    gone = {axis % len(shape) for axis in given} if given is not None else {a for a, n in enumerate(shape) if n == 1}
    labels = tuple(None if axis in gone else axis for axis in range(len(shape)))
    return Labels((labels, None), (tuple(label for label in labels if label is not None),), frozenset((0,)))


def _expand(node: ir.Node, flow: Flow) -> Labels:
    inputs, out = broadcast(node, flow, (0,))
    return Labels(tuple(inputs), (out,), frozenset((0,)))


def _fill(node: ir.Node, flow: Flow) -> Labels:
    return Labels((None,), (tuple(range(len(flow.shape(node.outputs[0])))),))


def _pad(node: ir.Node, flow: Flow) -> Labels:
    """Pad: only the padded axes change. What is zero stays so on the others, if what is added is zero."""
    rank = len(flow.shape(node.inputs[0]))
    pads = node.attributes["pads"].as_ints() if "pads" in node.attributes else flow.probe.constant(node.inputs[1])
    if pads is None or len(node.inputs) > 3:
        raise NoRuleError("pads by sizes that are computed at run time")
    padded = {axis for axis in range(rank) if pads[axis] or pads[axis + rank]}
    value = node.inputs[2] if len(node.inputs) > 2 else None
    added = node.attributes.get_float("value", 0.0) if value is None else flow.probe.constant(value)
    axes = tuple(range(rank))
    linear = frozenset((0,) if added == 0 else ())
    return Labels((axes, *(None,) * (len(node.inputs) - 1)), (axes,), linear, mixed=frozenset(padded))


def _tile(node: ir.Node, flow: Flow) -> Labels:
    """Tile: an axis of one element is repeated like a broadcast; a longer one has to be whole."""
    shape, out = flow.shape(node.inputs[0]), flow.shape(node.outputs[0])
    axes = tuple(axis if shape[axis] == out[axis] or shape[axis] > 1 else None for axis in range(len(shape)))
    repeated = frozenset(axis for axis in range(len(shape)) if 1 < shape[axis] < out[axis])
    return Labels((axes, None), (tuple(range(len(shape))),), frozenset((0,)), mixed=repeated)


@dataclasses.dataclass(frozen=True)
class _TileRule(LabelRule):
    """A label rule whose operator is also told how often to repeat."""

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        demand = LabelRule.demand(self, node, outputs, flow)
        if self._cut(node, demand, flow) and flow.probe.constant(node.inputs[1]) is None:
            raise NoRuleError("repeats by numbers that are computed at run time")
        return demand

    def _cut(self, node: ir.Node, demand: Demand, flow: Flow) -> dict[int, int]:
        """How often each axis is repeated for the heads left, where that is less than before."""
        shape, need = flow.shape(node.inputs[0]), demand.outputs[0]
        return {axis: len(index) for axis, index in enumerate(need) if index is not None and shape[axis] == 1}

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        cut, repeats = self._cut(node, demand, flow), flow.probe.constant(node.inputs[1])
        if cut and repeats is not None:
            set_ints(node, 1, [cut.get(axis, int(number)) for axis, number in enumerate(repeats)])


@dataclasses.dataclass(frozen=True)
class _FilledRule(LabelRule):
    """A label rule whose operator is also told the shape of its output."""

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        demand = LabelRule.demand(self, node, outputs, flow)
        check_shape_input(node, _source(node), demand.outputs[0], flow.probe)
        return demand

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        set_shape_input(node, _source(node), demand.outputs[0], flow.probe)


def _source(node: ir.Node) -> ir.Value | None:
    """The tensor that a shape input may refer to."""
    return None if node.op_type == "ConstantOfShape" else node.inputs[0]


def groups(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """Axes of a reshaped tensor that are split and merged among themselves, as ranges of (input axes, output axes).

    Row-major order splits a reshape wherever the products of the leading sizes agree.
    """
    found: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        start = (i, j)
        one = other = 1
        if i < len(before) and j < len(after):
            one, other, i, j = before[i], after[j], i + 1, j + 1
        while one != other or (not i < len(before)) != (not j < len(after)):
            if i < len(before) and (one < other or (one == other and before[i] == 1)):
                one, i = one * before[i], i + 1
            elif j < len(after) and (one > other or (one == other and after[j] == 1)):
                other, j = other * after[j], j + 1
            else:
                break
        if start == (i, j):
            raise NoRuleError(f"turns {before} into {after}, which are not the same elements")
        found.append((range(start[0], i), range(start[1], j)))
    return found


@dataclasses.dataclass(frozen=True)
class ReshapeRule:
    """Reshape and Flatten: indices of the merged axes are regrouped; what is not a whole box is widened to one."""

    selective: bool = False

    def _groups(self, node: ir.Node, flow: Flow) -> list[tuple[range, range]]:
        source, target = node.inputs[0], node.outputs[0]
        found = groups(flow.shape(source), flow.shape(target))
        before, after = flow.probe.other_shape(source), flow.probe.other_shape(target)
        if before is None or after is None or groups(before, after) != found:
            raise NoRuleError("regroups axes differently for other input sizes")
        return found

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        before, after = flow.shape(node.inputs[0]), flow.shape(node.outputs[0])
        need, held = list(whole(len(before))), list(outputs[0])
        for ins, outs in self._groups(node, flow):
            if all(held[axis] is None for axis in outs):
                continue
            if len(ins) == len(outs) == 1:
                need[ins[0]] = held[outs[0]]
                continue
            wanted = _box([held[axis] for axis in outs], [after[axis] for axis in outs])
            sides = _sides(wanted.reshape([before[axis] for axis in ins]))
            got = _box(sides, [before[axis] for axis in ins]).reshape([after[axis] for axis in outs])
            kept = _sides(got)
            if not np.array_equal(_box(kept, got.shape), got):
                raise NoRuleError("splits the heads over axes that do not go one by one")
            for axis, index in zip(ins, sides, strict=True):
                need[axis] = index
            for axis, index in zip(outs, kept, strict=True):
                held[axis] = index
        if node.op_type == "Reshape":
            check_shape_input(node, node.inputs[0], tuple(held), flow.probe)
        return Demand((tuple(need), None), (tuple(held),))

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], flow: Flow) -> list[Gain | None]:
        gain = gains[0]
        if gain is None:
            raise NoRuleError("takes its shape from a gate")
        before, after = flow.shape(node.inputs[0]), flow.shape(node.outputs[0])
        arrays: list[np.ndarray | None] = [None] * len(after)
        for ins, outs in self._groups(node, flow):
            if all(gain.axes[axis] is None for axis in ins):
                continue
            box = _outer([gain.axes[axis] for axis in ins], [before[axis] for axis in ins])
            box = box.reshape([after[axis] for axis in outs])
            for place, axis in enumerate(outs):
                # The factor of one axis is the box seen along it, if the box does not change along the others.
                along = np.moveaxis(box, place, 0).reshape(box.shape[place], -1)
                if (along == along[:, :1]).all() and not (box == box.flat[0]).all():
                    arrays[axis] = along[:, 0]
            if not np.array_equal(_outer([arrays[a] for a in outs], [after[a] for a in outs]), box):
                if not (box == box.flat[0]).all():
                    raise NoRuleError("splits the heads over several axes")
                arrays[outs[-1]] = np.full(after[outs[-1]], box.flat[0])
        return [Gain(tuple(arrays), gain.sites)]

    def mixes(self, node: ir.Node, index: int, axis: int, flow: Flow) -> bool:
        return False

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        if node.op_type == "Reshape":
            set_shape_input(node, node.inputs[0], demand.outputs[0], flow.probe)


def _outer(factors: Sequence[np.ndarray | None], sizes: Sequence[int]) -> np.ndarray:
    """Outer product of one factor an axis (None: ones)."""
    product = np.ones(())
    for factor, size in zip(factors, sizes, strict=True):
        product = np.multiply.outer(product, np.ones(size) if factor is None else factor)
    return product


def _box(sides: Sequence[Index], sizes: Sequence[int]) -> np.ndarray:
    """Boolean array that is true where every axis's position is in its index."""
    pairs = zip(sides, sizes, strict=True)
    return _outer([None if side is None else np.isin(np.arange(size), side) for side, size in pairs], sizes) != 0


def _sides(box: np.ndarray) -> list[Index]:
    """The smallest index an axis that together cover every true entry."""
    rank = box.ndim
    return [
        simplify(np.flatnonzero(box.any(axis=tuple(a for a in range(rank) if a != axis))), box.shape[axis])
        for axis in range(rank)
    ]


@dataclasses.dataclass(frozen=True)
class ShapeRule:
    """Shape: reads no content; after a cut it still reports the sizes that the graph was made for."""

    selective: bool = True

    def demand(self, node: ir.Node, outputs: Sequence[Need], flow: Flow) -> Demand:
        return Demand((None,), tuple(outputs))

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], flow: Flow) -> list[Gain | None]:
        return [None]

    def mixes(self, node: ir.Node, index: int, axis: int, flow: Flow) -> bool:
        return False

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], flow: Flow) -> None:
        source = node.inputs[0]
        need = held[0]
        if need is None or source is None or node.graph is None:
            return
        shape = flow.shape(source)
        start, end, _ = slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", None)).indices(
            len(shape)
        )
        parts: list[ir.Value] = []
        nodes: list[ir.Node] = []
        for axis in range(start, end):
            index = need[axis]
            if index is None or not flow.probe.fixed(source, axis):
                sizes, place = ir.node("Shape", [source]), ints([axis])
                part = ir.node("Gather", [sizes.outputs[0], place.outputs[0]], {"axis": 0})
                nodes += [sizes, place, part]
            else:
                part = ints([shape[axis]])
                nodes.append(part)
            if index is not None and not flow.probe.fixed(source, axis):
                # Batch and heads share this axis: it is as much longer as there were more heads.
                more, fewer = ints([shape[axis]]), ints([len(index)])
                product = ir.node("Mul", [part.outputs[0], more.outputs[0]])
                part = ir.node("Div", [product.outputs[0], fewer.outputs[0]])
                nodes += [more, fewer, product, part]
            parts.append(part.outputs[0])
        joined = ir.node("Concat", parts, {"axis": 0})
        node.graph.insert_before(node, [*nodes, joined])
        node.op_type = "Identity"
        node.attributes.clear()
        node.replace_input_with(0, joined.outputs[0])


RULES: dict[tuple[str, str], Rule] = {
    ("", "Transpose"): LabelRule(_transpose),
    ("", "Unsqueeze"): LabelRule(_unsqueeze),
    ("", "Squeeze"): LabelRule(_squeeze),
    ("", "Expand"): _FilledRule(_expand),
    ("", "ConstantOfShape"): _FilledRule(_fill),
    ("", "Pad"): LabelRule(_pad),
    ("", "Tile"): _TileRule(_tile),
    ("", "Reshape"): ReshapeRule(),
    ("", "Flatten"): ReshapeRule(),
    ("", "Shape"): ShapeRule(),
}
