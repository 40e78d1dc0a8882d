"""Cut a graph down to what is needed: initializers, tensors and the sizes that nodes state."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.cut_inputs import cut_input
from graph_passes.flow.edit import cut_tensor
from graph_passes.flow.indices import Need, all_indices, is_partial
from graph_passes.flow.initializer_copies import InitializerCopies
from graph_passes.flow.rule import Demand, Rule, RuleContext


class Cuts(RuleContext):
    """The needs by which a graph is cut: what each tensor will hold, and what each node demands of its inputs.

    Args:
        probe: the graph's shapes.
        rules: the rule of each operator, by (domain, type).

    Attributes:
        needs: what each computed tensor will hold, where that is not everything.
        demands: the rule's answer for each node that has a rule.
    """

    def __init__(self, probe: Probe, rules: Mapping[tuple[str, str], Rule]) -> None:
        super().__init__(probe)
        self.needs: dict[ir.Value, Need] = {}
        self.demands: dict[ir.Node, Demand] = {}
        self._rules = rules

    def rule(self, node: ir.Node) -> Rule | None:
        """The rule of a node's operator, or None."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        return self._rules.get((domain, node.op_type))

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
                need = _excess(need, held[position], selected if position == 0 else ())
                cut = cut_input(value, held[position], need, node, cuts)
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


def _excess(need: Need, held: Need, axes: Collection[int]) -> Need:
    """What is needed of a tensor if some axes stay as they are held."""
    return tuple(held[axis] if axis in axes else index for axis, index in enumerate(need))


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
