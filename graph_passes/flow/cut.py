"""Cut a graph down to what is needed: initializers, tensors and the sizes that nodes state."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.edit import InitializerCopies, cut_tensor, cut_value, cut_value_of_rows, positions_among
from graph_passes.flow.indices import Index, Need, all_indices, is_partial, part_of_each_row, positions_of, same_index
from graph_passes.flow.rule import Demand, Rule, RuleContext
from graph_passes.flow.sizes import BATCH


class Cuts(RuleContext):
    """The needs by which a graph is cut: what each tensor will hold, and what each node demands of its inputs.

    Attributes:
        needs: the indices that each computed tensor will hold, if not all.
        demands: the rule's answer for each node that has a rule.
    """

    def __init__(self, probe: Probe, rules: Mapping[tuple[str, str], Rule]) -> None:
        super().__init__(probe)
        self.needs: dict[ir.Value, Need] = {}
        self.demands: dict[ir.Node, Demand] = {}
        self._rules = rules

    def rule(self, node: ir.Node) -> Rule | None:
        """The rule of a node's operator, or None."""
        return self._rules.get((node.domain, node.op_type))

    def full_need(self, value: ir.Value) -> Need:
        """The need of all of a tensor."""
        return all_indices(len(self.probe.shape(value) or ()))

    def held(self, value: ir.Value | None) -> Need:
        """The indices that a tensor holds once the nodes before are cut."""
        return () if value is None else self.needs.get(value, self.full_need(value))

    def hold(self, value: ir.Value, need: Need) -> None:
        """Record what a node's output will hold, which may be more than is needed of it."""
        if is_partial(need):
            self.needs[value] = need
        else:
            self.needs.pop(value, None)


def cut_nodes(model: ir.Model, cuts: Cuts) -> int:
    """Rewrite every node whose inputs or outputs hold less than before; returns the number of nodes."""
    copies = InitializerCopies(model.graph, "cut")
    count = 0
    for node in list(model.graph):
        demand, rule = cuts.demands.get(node), cuts.rule(node)
        held = [cuts.held(value) for value in node.inputs]
        if demand is None or rule is None or not any(is_partial(need) for need in (*held, *demand.outputs)):
            continue
        selected = () if cuts.counts_positions else rule.selected_axes(node, cuts)
        for position, (value, need) in enumerate(zip(node.inputs, demand.inputs, strict=False)):
            if value is None or need is None:
                continue
            if value.is_initializer():
                cut = _cut_initializer(value, need, copies)
            else:
                kept = selected if position == 0 else ()  # axes that the node cuts itself
                need = tuple(held[position][axis] if axis in kept else index for axis, index in enumerate(need))
                cut = _cut_input(value, held[position], need, node, cuts)
            held[position] = need
            node.replace_input_with(position, cut)
            cuts.probe.copy_shape(cut, value)
        rule.rewrite(node, demand, held, cuts)
        for value, need in zip(node.outputs, demand.outputs, strict=False):
            _restate_shape(value, need, free=cuts.counts_positions)
        count += 1
    for value in model.graph.inputs:
        _restate_shape(value, cuts.held(value), free=cuts.counts_positions)
    common.RemoveUnusedNodesPass()(model)
    copies.take_over_names()
    return count


def _cut_initializer(value: ir.Value, need: Need, copies: InitializerCopies) -> ir.Value:
    """The initializer that holds only the indices needed."""
    tensor = value.const_value
    if tensor is None or not is_partial(need):
        return value
    key = tuple(None if index is None else index.tobytes() for index in need)
    return copies.copy(value, key, lambda name: cut_tensor(tensor, need, name))


def _restate_shape(value: ir.Value, need: Need, *, free: bool) -> None:
    """Correct the shape that the file records for a cut tensor.

    A size that is no number becomes the number of needed indices if `free`, and else unknown: heads share the axis with
    the batch, and tensors of other heads have the same symbol.
    """
    if value.shape is not None and is_partial(need) and len(value.shape) == len(need):
        sizes: list[int | ir.SymbolicDim | None] = []
        for size, index in zip(value.shape, need, strict=True):
            if index is None:
                sizes.append(size)
            else:
                sizes.append(len(index) if free or isinstance(size, int) else None)
        value.shape = ir.Shape(sizes)


def _cut_input(value: ir.Value, held: Need, need: Need, node: ir.Node, context: RuleContext) -> ir.Value:
    """A tensor cut before a node from the indices that it holds to those that the node needs.

    Where an axis merges rows with heads, its size depends on the graph's inputs, and the positions are computed.
    """
    result = value
    for axis, (index, held_index) in enumerate(zip(need, held, strict=True)):
        if index is None or same_index(held_index, index):
            continue
        positions = positions_among(index, held_index)
        count, rows = len(positions_of(held_index, context.shape(value)[axis])), _rows_of(value, axis, context)
        part = part_of_each_row(np.asarray(positions), count, rows) if rows else None
        if part is None:
            result = cut_value(result, axis, positions, node)
        else:
            result = cut_value_of_rows(result, axis, part, count // rows, node)
    if result is not value:
        context.probe.copy_shape(result, value)
    return result


def can_cut(value: ir.Value, axis: int, held_index: Index, index: Index, context: RuleContext) -> bool:
    """Whether an axis can be cut from what a tensor holds to what a node needs, at any size of the inputs.

    Where an axis merges rows with heads, every row has to need the same heads, and to have as many at any size: a row
    that holds positions beside the heads is not cut.
    """
    rows = _rows_of(value, axis, context)
    if index is None or not rows or same_index(held_index, index):
        return True
    first, second = context.probe.shapes(value)
    if first is None or second is None or first[axis] * BATCH[1] != second[axis] * BATCH[0]:
        return False
    count = len(positions_of(held_index, context.shape(value)[axis]))
    return part_of_each_row(np.asarray(positions_among(index, held_index)), count, rows) is not None


def _rows_of(value: ir.Value, axis: int, context: RuleContext) -> int:
    """Number of rows that an axis merges with heads under the first assignment of sizes; 0 if it holds heads only."""
    return 0 if context.counts_positions or context.probe.fixed(value, axis) else BATCH[0]
