"""Slice: each output position of an axis is an input position between two bounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.edit import cut_value, positions_among, set_ints
from graph_passes.flow.indices import Need, positions_of, simplify
from graph_passes.flow.refusal import RefusalCode
from graph_passes.flow.rule import Demand, Gain, NoRuleError, Rule, RuleContext
from graph_passes.tape import input_of


class SliceRule(Rule):
    """Slice: output position i of an axis is input position start + i * step."""

    def selected_axes(self, node: ir.Node, context: RuleContext) -> Collection[int]:
        return self._positions(node, context).keys()

    def _positions(self, node: ir.Node, context: RuleContext) -> dict[int, np.ndarray | None]:
        """Sliced axis -> selected input positions; None where they depend on the sizes of the graph's inputs.

        An axis that is listed and keeps all positions at any size, as in `x[:, 0]`, is not sliced.
        """
        source, shape = node.inputs[0], context.shape(node.inputs[0])
        starts, ends, axes, steps = _bounds(node, context)
        positions: dict[int, np.ndarray | None] = {}
        for entry, axis in enumerate(axes):
            if starts is None or ends is None or steps is None:
                positions[axis] = None
                continue
            start, end, step = int(starts[entry]), int(ends[entry]), int(steps[entry])
            if context.probe.fixed(source, axis):
                positions[axis] = np.arange(shape[axis])[slice(start, _end(end, step), step)]
            elif (start, step) != (0, 1) or end < _NO_END:
                positions[axis] = None
        return positions

    def demand(self, node: ir.Node, outputs: Sequence[Need], context: RuleContext) -> Demand:
        need = list(outputs[0])
        for axis, positions in self._positions(node, context).items():
            if positions is None and need[axis] is not None:
                raise _computed_bounds()
            if positions is not None:
                size = context.shape(node.inputs[0])[axis]
                need[axis] = simplify(np.sort(positions[positions_of(need[axis], len(positions))]), size)
        return Demand((tuple(need), *(None,) * (len(node.inputs) - 1)), tuple(outputs))

    def gain(self, node: ir.Node, gains: Sequence[Gain | None], context: RuleContext) -> list[Gain | None]:
        gain = gains[0]
        if gain is None:
            raise NoRuleError(RefusalCode.NOT_LINEAR, "reads its bounds from a gate")
        arrays = list(gain.axes)
        for axis, positions in self._positions(node, context).items():
            array = arrays[axis]
            if array is not None:
                if positions is None:
                    raise _computed_bounds()
                arrays[axis] = array[positions]
        return [Gain(tuple(arrays), gain.sites)]

    def mixes(self, node: ir.Node, position: int, axis: int, context: RuleContext) -> bool:
        return self._positions(node, context).get(axis, np.arange(0)) is None

    def rewrite(self, node: ir.Node, demand: Demand, held: Sequence[Need | None], context: RuleContext) -> None:
        """Cut the heads' axes by index before the node, which then no longer slices them."""
        source, held_axes = node.inputs[0], held[0]
        assert source is not None
        assert held_axes is not None
        positions, axes = self._positions(node, context), _bounds(node, context)[2]
        needed = demand.outputs[0]
        cut = {
            axis: taken
            for axis, taken in positions.items()
            if taken is not None and (held_axes[axis] is not None or needed[axis] is not None)
        }
        for axis, sliced in cut.items():
            index = sliced[positions_of(needed[axis], len(sliced))]
            source = cut_value(source, axis, positions_among(index, held_axes[axis]), node)
        node.replace_input_with(0, source)
        uncut = [entry for entry, axis in enumerate(axes) if axis not in cut]
        if cut and not uncut:
            node.op_type = "Identity"
            node.resize_inputs(1)
            node.attributes.clear()
        elif cut:
            _keep_entries(node, uncut, axes)


def _computed_bounds() -> NoRuleError:
    return NoRuleError(RefusalCode.COMPUTED_VALUE, "slices by indices that are computed at run time")


def _keep_entries(node: ir.Node, entries: Sequence[int], axes: Sequence[int]) -> None:
    """Keep only some entries of the axes, bounds and steps that a Slice lists."""
    if "starts" in node.attributes:
        lists = {name: node.attributes[name].as_ints() for name in ("starts", "ends")} | {"axes": axes}
        for name, values in lists.items():
            node.attributes[name] = ir.AttrInt64s(name, [values[entry] for entry in entries])
        return
    for position in (1, 2, 4):
        if (value := input_of(node, position)) is not None:
            node.replace_input_with(position, cut_value(value, 0, np.array(entries), node))
    set_ints(node, 3, [axes[entry] for entry in entries])


def _bounds(
    node: ir.Node, context: RuleContext
) -> tuple[np.ndarray | None, np.ndarray | None, list[int], np.ndarray | None]:
    """(starts, ends, axes, steps) of a Slice: attributes before opset 10, inputs since; None: computed at run time.

    Axes are counted from the first one.
    """
    rank = len(context.shape(node.inputs[0]))
    if "starts" in node.attributes:
        starts, ends = (np.array(node.attributes[name].as_ints()) for name in ("starts", "ends"))
        axes = node.attributes.get_ints("axes", tuple(range(len(starts))))
        return starts, ends, [int(axis) % rank for axis in axes], np.ones(len(starts), np.int64)
    count = context.shape(node.inputs[1])[0]
    inputs = [*node.inputs[1:], None, None][:4]
    first, last, listed_axes, steps = (context.probe.constant(value) for value in inputs)
    if listed_axes is None:
        if inputs[2] is not None:
            raise NoRuleError(RefusalCode.COMPUTED_VALUE, "slices axes that are computed at run time")
        listed_axes = np.arange(count)
    axes = [int(axis) % rank for axis in listed_axes]
    return first, last, axes, np.ones(count, np.int64) if inputs[3] is None else steps


def _end(end: int, step: int) -> int | None:
    """The end of a Python slice: None for a backward slice that runs to the first element."""
    return None if step < 0 and end < -(2**31) else end


_NO_END = 2**31 - 1
"""Smallest bound that exporters write for the end of an axis of any size."""

RULES: dict[tuple[str, str], Rule] = {("", "Slice"): SliceRule()}
