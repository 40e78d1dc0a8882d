"""Drop unread positions: compute only the positions that the graph reads.

A classifier reads the first position of its last layer. There queries, the product with values, the output projection
and the feed-forward layer are needed at that position alone; keys and values are needed everywhere. The analysis walks
back from the nodes that select single indices by the rules of the operators, as `Flow` does from dropped heads. It ends
at tensors that are also read whole and at operators that mix positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.axis_flow import captured_by_bodies
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.cut import Cuts, cut_nodes
from graph_passes.flow.edit import positions_among, set_ints
from graph_passes.flow.indices import Index, Need, all_indices, is_partial, same_index, simplify, union
from graph_passes.flow.rule import Demand, NoRuleError, Rule, RuleContext
from graph_passes.flow.rules import RULES
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed

_PRODUCTS = frozenset(("MatMul", "Gemm", "Attention"))


class DropUnreadPositions(GraphPass[Names]):
    """Compute only the positions that are read, e.g. the first one of the last layer in a classifier.

    Cases:
        1. All readers of a tensor need the same positions: its node computes these alone.
        2. A tensor is also read whole, as the input of keys and values is: it is cut before the node that needs less.
        3. Positions are selected by indices that are computed or count from the end (the last token of each row): the
           graph stays as it is.
        4. An operator mixes positions or has no rule: its output is computed whole and cut after it.
        5. No product would compute less: the graph stays as it is.

    The report has the names of the products and attentions that compute fewer positions than before, in graph order.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        flow = _PositionFlow(model, RULES, Probe(model))
        products = tuple(
            node.name or ""
            for node in model.graph
            if node in flow.demands and node.op_type in _PRODUCTS and is_partial(flow.demands[node].outputs[0])
        )
        if products:
            cut_nodes(model, flow)
            flow.restate_selections()
        return changed(model, products)


class _PositionFlow(Cuts):
    """Needs of one graph that result from the indices that nodes select on an axis (`selections`)."""

    counts_positions = True

    def __init__(self, model: ir.Model, rules: Mapping[tuple[str, str], Rule], probe: Probe) -> None:
        super().__init__(probe, rules)
        self._other_sizes = _OtherSizes(probe.exchanged())
        self.selections: dict[ir.Node, tuple[int, np.ndarray]] = {}
        uses: dict[ir.Value, list[Need]] = {value: [self.full_need(value)] for value in model.graph.outputs}
        uses.update(
            {value: [self.full_need(value)] for value in (*captured_by_bodies(model.graph), *model.graph.inputs)}
        )
        for node in reversed(model.graph):
            outputs = [self._total_need(value, uses.pop(value, [])) for value in node.outputs]
            for source, need in zip(node.inputs, self._demand(node, outputs).inputs, strict=False):
                if source is not None and need is not None:
                    uses.setdefault(source, []).append(need)

    def restate_selections(self) -> None:
        """Rewrite the indices of each `Gather` whose input holds fewer positions than before."""
        for node, (axis, indices) in self.selections.items():
            held = self.held(node.inputs[0])[axis]
            if held is not None and node.op_type == "Gather":
                positions = np.asarray(positions_among(indices, held))
                if not np.array_equal(positions, indices):
                    set_ints(node, 1, positions)

    def _total_need(self, value: ir.Value, needs: Sequence[Need]) -> Need:
        shape = self.probe.shape(value) or ()
        if not needs:
            return all_indices(len(shape))
        total = list(needs[0])
        for need in needs[1:]:
            total = [union(first, second) for first, second in zip(total, need, strict=True)]
        total = [
            simplify(index, size) if self.probe.fixed(value, axis) else index
            for axis, (index, size) in enumerate(zip(total, shape, strict=True))
        ]
        self.hold(value, tuple(total))
        return tuple(total)

    def _demand(self, node: ir.Node, outputs: Sequence[Need]) -> Demand:
        rule = self.rule(node)
        if not any(map(is_partial, outputs)):
            return self._selection(node) or self._everything(node)
        try:
            if rule is None:
                return self._everything(node)
            demand = rule.demand(node, outputs, self)
            is_general = _is_same(demand, rule.demand(node, outputs, self._other_sizes))
        except NoRuleError:
            return self._everything(node)
        if not is_general or not all(map(_covers, demand.outputs, outputs)):
            return self._everything(node)
        self.demands[node] = demand
        for value, need in zip(node.outputs, demand.outputs, strict=False):
            self.hold(value, need)
        return demand

    def _everything(self, node: ir.Node) -> Demand:
        """The demand of a node that computes all of its outputs; readers that need less cut them."""
        for value in node.outputs:
            self.needs.pop(value, None)
        inputs = tuple(None if value is None else self.full_need(value) for value in node.inputs)
        return Demand(inputs, tuple(map(self.full_need, node.outputs)))

    def _selection(self, node: ir.Node) -> Demand | None:
        """The demand of a node that selects indices; None for any other node."""
        selected = self._selected(node)
        if selected is None:
            return None
        axis, indices = selected
        self.selections[node] = selected
        everything = self._everything(node)
        need: list[Index] = list(everything.inputs[0] or ())
        need[axis] = np.unique(indices)
        return Demand((tuple(need), *everything.inputs[1:]), everything.outputs)

    def _selected(self, node: ir.Node) -> tuple[int, np.ndarray] | None:
        """The axis and the indices that a node selects: `Gather` of constant indices, or `Slice` of the first index.

        Indices that count from the end, and those that a graph computes, e.g. of the last token of each row, are no
        constants.
        """
        source = node.inputs[0] if node.inputs else None
        shape, dtype = self.probe.shape(source), self.probe.dtype(source)
        if source is None or source.is_initializer() or not shape or node.domain:
            return None
        if dtype is None or not dtype.is_floating_point():  # sizes, not activations
            return None
        if node.op_type == "Gather":
            axis, indices = node.attributes.get_int("axis", 0) % len(shape), self.probe.constant(node.inputs[1])
            if indices is None or indices.ndim > 1 or indices.size == 0 or indices.min() < 0:
                return None
            return axis, np.asarray(indices)
        if node.op_type == "Slice" and len(node.inputs) >= 4:
            starts, ends, axes = (self.probe.constant(value) for value in node.inputs[1:4])
            steps = self.probe.constant(node.inputs[4]) if len(node.inputs) > 4 else np.ones(1)
            bounds = [None if array is None else array.tolist() for array in (starts, ends, steps)]
            if bounds == [[0], [1], [1]] and axes is not None:
                return int(axes[0]) % len(shape), np.zeros(1, np.int64)
        return None


class _OtherSizes(RuleContext):
    """The shapes of a graph under the other assignment of sizes."""

    counts_positions = True


def _is_same(first: Demand, second: Demand) -> bool:
    """Whether a node needs the same indices for inputs of other sizes.

    It does not where an axis of positions is merged with the batch, or where positions cover an axis of some size.
    """
    pairs = zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=True)
    return all(a is b is None or (a is not None and b is not None and all(map(same_index, a, b))) for a, b in pairs)


def _covers(held: Need, need: Need) -> bool:
    """Whether the indices that a tensor will hold are at least those needed of it.

    A rule leaves out indices that are beyond the sizes with which shapes are inferred.
    """
    return all(
        index is None or (wanted is not None and bool(np.isin(wanted, index).all()))
        for index, wanted in zip(held, need, strict=True)
    )
