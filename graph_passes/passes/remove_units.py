"""Remove units: cut every tensor to the indices that the kept heads need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from graph_passes.attention.gate_initializers import gate_contents
from graph_passes.flow.axis_flow import Flow
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.cut import cut_nodes
from graph_passes.flow.indices import Need
from graph_passes.flow.refusal import Refusal
from graph_passes.flow.rules import RULES
from graph_passes.passes.base import GraphPass, ReportedResult


@dataclasses.dataclass(frozen=True)
class RemovedUnits:
    """What `RemoveUnits` changed.

    Attributes:
        nodes: number of nodes that were rewritten.
        refused: sites whose heads stay, with the operator that prevents their removal; one entry for each operator.
        shared: sites whose dropped queries or keys are still computed, because a norm reads all heads; with that norm.
        caches: name of a cache's input -> the indices that it holds now, if not all.
    """

    nodes: int
    refused: tuple[Refusal, ...]
    shared: tuple[Refusal, ...] = ()
    caches: Mapping[str, Need] = dataclasses.field(default_factory=dict)


class RemoveUnits(GraphPass[RemovedUnits]):
    """Cut the heads whose gate is zero out of the graph.

    Args:
        returned: name of an output -> the indices that the graph which reads it as a cache needs.

    Cases:
        1. A computed tensor holds more than a node needs (shared tables, unevenly grouped heads): it is cut before the
           node.
        2. An initializer is cut for the node that reads it; nodes that need the same indices share the cut initializer.
        3. The node itself states sizes (in shapes or attributes): its rule rewrites them.
        4. Heads of a site reach an operator without a rule: the site keeps its heads, gated, and is refused.
        5. A norm over the queries or keys of all heads reads dropped ones: those are computed, and cut after the norm.
    """

    inlined = True

    def __init__(self, returned: Mapping[str, Need] | None = None) -> None:
        self.returned = returned or {}

    def call(self, model: ir.Model) -> ReportedResult[RemovedUnits]:
        probe = Probe(model)
        refused: list[Refusal] = []
        refused_sites: set[str] = set()
        while True:
            contents = gate_contents(model.graph).items()
            gates = {value: (site, content) for value, (site, content) in contents if site not in refused_sites}
            returned = {name: need for name, need in self.returned.items() if name not in refused_sites}
            flow = Flow(model, gates, RULES, probe, returned=returned)
            if not flow.refusals:
                break
            refused.extend(_first_of_each(flow.refusals))
            refused_sites.update(*(refusal.sites for refusal in flow.refusals))
        caches = {value.name or "": flow.needs[value] for value in model.graph.inputs if value in flow.needs}
        nodes = cut_nodes(model, flow)
        shared = tuple(_first_of_each(flow.shared))
        return ReportedResult(model, bool(nodes), RemovedUnits(nodes, tuple(refused), shared, caches))


def _first_of_each(refusals: list[Refusal]) -> list[Refusal]:
    """The first refusal for each operator and set of sites."""
    first = {(refusal.sites, refusal.op, refusal.node): refusal for refusal in reversed(refusals)}
    return list(reversed(first.values()))
