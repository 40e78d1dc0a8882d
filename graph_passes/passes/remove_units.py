"""Remove units: cut every tensor to the indices that the kept heads need."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.attention.gate_initializers import find_gates
from graph_passes.flow.axis_flow import Flow
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.edit import cut_tensor, cut_value, positions_among
from graph_passes.flow.indices import Need, is_partial, same_index, whole
from graph_passes.flow.refusal import Refusal
from graph_passes.flow.rules import RULES
from graph_passes.passes.base import GraphPass, ReportedResult, require_inlined


@dataclasses.dataclass(frozen=True)
class RemovedUnits:
    """What `RemoveUnits` changed.

    Attributes:
        nodes: number of nodes that were rewritten.
        refused: sites whose heads stay, with the operator that prevents their removal; one entry for each operator.
    """

    nodes: int
    refused: tuple[Refusal, ...]


class RemoveUnits(GraphPass[RemovedUnits]):
    """Cut the heads whose gate is zero out of the graph.

    Cases:
        1. A computed tensor holds more than a node needs (shared tables, unevenly grouped heads): it is cut before the
           node.
        2. An initializer is cut for the node that reads it; nodes that need the same indices share the cut initializer.
        3. The node itself states sizes (in shapes or attributes): its rule rewrites them.
        4. Heads of a site reach an operator without a rule: the site keeps its heads, gated, and is refused.
    """

    def requires(self, model: ir.Model) -> None:
        require_inlined(model)

    def call(self, model: ir.Model) -> ReportedResult[RemovedUnits]:
        probe = Probe(model)
        refused: list[Refusal] = []
        refused_sites: set[str] = set()
        while True:
            gates = {
                value: (site, value.const_value.numpy())
                for site, value in find_gates(model.graph).items()
                if site not in refused_sites and value.const_value is not None
            }
            flow = Flow(model, gates, RULES, probe)
            if not flow.refusals:
                break
            refused.extend(_first_of_each(flow.refusals))
            refused_sites.update(*(refusal.sites for refusal in flow.refusals))
        nodes = _cut_nodes(model, flow)
        return ReportedResult(model, bool(nodes), RemovedUnits(nodes, tuple(refused)))


def _first_of_each(refusals: list[Refusal]) -> list[Refusal]:
    """The first refusal for each operator and set of sites."""
    first = {(refusal.sites, refusal.op, refusal.node): refusal for refusal in reversed(refusals)}
    return list(reversed(first.values()))


def _cut_nodes(model: ir.Model, flow: Flow) -> int:
    """Rewrite every node whose inputs or outputs hold less than before; returns the number of nodes."""
    initializers = _CutInitializers(model.graph)
    count = 0
    for node in list(model.graph):
        demand, rule = flow.demands.get(node), flow.rule(node)
        held = [_held(value, flow) for value in node.inputs]
        if demand is None or rule is None or not any(is_partial(need) for need in (*held, *demand.outputs)):
            continue
        for position, (value, need) in enumerate(zip(node.inputs, demand.inputs, strict=False)):
            if value is None or need is None:
                continue
            if value.is_initializer():
                cut, held[position] = initializers.cut(value, need), need
            elif not rule.selective:
                cut = _cut_edge(value, held[position], need, node)
            else:
                continue
            node.replace_input_with(position, cut)
            flow.probe.copy_shape(cut, value)
        rule.rewrite(node, demand, held, flow)
        for value, need in zip(node.outputs, demand.outputs, strict=False):
            _restate_shape(value, need)
        count += 1
    common.RemoveUnusedNodesPass()(model)
    initializers.take_over_names()
    return count


def _held(value: ir.Value | None, flow: Flow) -> Need:
    """The indices that a tensor holds after the nodes before it are cut."""
    if value is None:
        return ()
    return flow.needs.get(value, whole(len(flow.probe.shape(value) or ())))


def _cut_edge(value: ir.Value, held: Need, need: Need, node: ir.Node) -> ir.Value:
    """Case 1: cut a tensor from the indices that it holds to those that the node needs."""
    for axis, (held_index, index) in enumerate(zip(held, need, strict=True)):
        if index is not None and not same_index(held_index, index):
            value = cut_value(value, axis, positions_among(index, held_index), node)
    return value


class _CutInitializers:
    """Cut copies of a graph's initializers, one for each need (case 2)."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._copies: dict[tuple[ir.Value, tuple[bytes | None, ...]], ir.Value] = {}

    def cut(self, value: ir.Value, need: Need) -> ir.Value:
        """The initializer that holds only the indices needed."""
        tensor = value.const_value
        if tensor is None or not is_partial(need):
            return value
        key = (value, tuple(None if index is None else index.tobytes() for index in need))
        if key not in self._copies:
            name = f"{value.name}.cut{sum(original is value for original, _ in self._copies)}"
            content = cut_tensor(tensor, need, name)
            copy = ir.Value(name=name, const_value=content, type=ir.TensorType(tensor.dtype), shape=content.shape)
            self._graph.register_initializer(copy)
            self._copies[key] = copy
        return self._copies[key]

    def take_over_names(self) -> None:
        """Give copies the names of the initializers that were removed as unused."""
        for (value, _), copy in self._copies.items():
            name = value.name
            if name is not None and name not in self._graph.initializers:
                copy.name = name
                if copy.const_value is not None:
                    copy.const_value.name = name


def _restate_shape(value: ir.Value, need: Need) -> None:
    """Correct the shape that the file records for a cut tensor."""
    if value.shape is not None and is_partial(need) and len(value.shape) == len(need):
        sizes = zip(value.shape, need, strict=True)
        value.shape = ir.Shape(
            [size if index is None or not isinstance(size, int) else len(index) for size, index in sizes]
        )
