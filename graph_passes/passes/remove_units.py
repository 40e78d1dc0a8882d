"""Remove dead heads: cut every tensor down to what the kept heads need."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.attention.gates import find_gates
from graph_passes.flow.axis_flow import Flow, Need, Refusal, partial, same, whole
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.edit import cut_tensor, cut_value, positions_among
from graph_passes.flow.rules import RULES

_Cuts = dict[tuple[ir.Value, tuple[bytes | None, ...]], ir.Value]


class RemoveHeads(ir.passes.InPlacePass):
    """Cut the heads whose gate is zero out of the graph.

    Cases:
        1. A computed tensor holds more than a node needs (shared tables, unevenly grouped heads): it is cut before it.
        2. An initializer is cut for the node that reads it; nodes that need the same share the cut one.
        3. The node itself states sizes (shapes, attributes): its rule restates them.

    A site that meets an operator without a rule is left whole, gate and all, and listed in `refused`.
    """

    def __init__(self) -> None:
        self.refused: list[Refusal] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        probe = Probe(model)
        left: set[str] = set()
        while True:
            gates = {
                value: (site, value.const_value.numpy())
                for site, value in find_gates(model.graph).items()
                if site not in left and value.const_value is not None
            }
            flow = Flow(model, gates, RULES, probe)
            if not flow.refusals:
                break
            self.refused.extend(_first_of_each(flow.refusals))
            left.update(*(refusal.sites for refusal in flow.refusals))
        changed = _cut(model, flow)
        return ir.passes.PassResult(model, changed)


def _first_of_each(refusals: list[Refusal]) -> list[Refusal]:
    """One refusal for each operator, of those that name the same sites."""
    found = {(refusal.sites, refusal.op, refusal.node): refusal for refusal in reversed(refusals)}
    return list(reversed(found.values()))


def _cut(model: ir.Model, flow: Flow) -> bool:
    """Rewrite every node whose inputs or outputs hold less than they did."""
    cuts: _Cuts = {}
    changed = False
    for node in list(model.graph):
        demand, rule = flow.demands.get(node), flow.rule(node)
        held = [_held(value, flow) for value in node.inputs]
        if demand is None or rule is None or not any(partial(need) for need in (*held, *demand.outputs)):
            continue
        for position, (value, need) in enumerate(zip(node.inputs, demand.inputs, strict=False)):
            if value is None or need is None:
                continue
            if value.is_initializer():
                new, held[position] = _cut_initializer(model.graph, value, need, cuts), need
            elif not rule.selective:
                new = _cut_edge(value, held[position], need, node)
            else:
                continue
            node.replace_input_with(position, new)
            flow.probe.stand_in(new, value)
        rule.rewrite(node, demand, held, flow)
        for value, need in zip(node.outputs, demand.outputs, strict=False):
            _restate(value, need)
        changed = True
    common.RemoveUnusedNodesPass()(model)
    _keep_names(model.graph, cuts)
    return changed


def _held(value: ir.Value | None, flow: Flow) -> Need:
    """What a tensor holds after the cut of the nodes before."""
    if value is None:
        return ()
    return flow.needs.get(value, whole(len(flow.probe.shape(value) or ())))


def _cut_edge(value: ir.Value, held: Need, need: Need, node: ir.Node) -> ir.Value:
    """The value cut from what it holds to what the node needs (case 1)."""
    for axis, (have, index) in enumerate(zip(held, need, strict=True)):
        if index is not None and not same(have, index):
            value = cut_value(value, axis, positions_among(index, have), node)
    return value


def _cut_initializer(graph: ir.Graph, value: ir.Value, need: Need, cuts: _Cuts) -> ir.Value:
    """The initializer that holds only what is needed; made once for each different need (case 2)."""
    tensor = value.const_value
    if tensor is None or not partial(need):
        return value
    key = (value, tuple(None if index is None else index.tobytes() for index in need))
    if key not in cuts:
        name = f"{value.name}.cut{sum(made is value for made, _ in cuts)}"
        content = cut_tensor(tensor, need, name)
        cut = ir.Value(name=name, const_value=content, type=ir.TensorType(tensor.dtype), shape=content.shape)
        graph.register_initializer(cut)
        cuts[key] = cut
    return cuts[key]


def _keep_names(graph: ir.Graph, cuts: _Cuts) -> None:
    """Give a cut initializer the name of the one that it stands in for, where that one has gone."""
    for (value, _), cut in cuts.items():
        name = value.name
        if name is not None and name not in graph.initializers:
            cut.name = name
            if cut.const_value is not None:
                cut.const_value.name = name


def _restate(value: ir.Value, need: Need) -> None:
    """Correct the shape that the file records for a cut tensor."""
    if value.shape is not None and partial(need) and len(value.shape) == len(need):
        sizes = zip(value.shape, need, strict=True)
        value.shape = ir.Shape(
            [size if index is None or not isinstance(size, int) else len(index) for size, index in sizes]
        )
