"""Drop unread positions: compute only the positions that the graph reads."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.cut import cut_nodes
from graph_passes.flow.indices import is_partial
from graph_passes.flow.position_flow import PositionFlow
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
        flow = PositionFlow(model, RULES, Probe(model))
        products = tuple(
            node.name or ""
            for node in model.graph
            if node in flow.demands and node.op_type in _PRODUCTS and is_partial(flow.demands[node].outputs[0])
        )
        if products:
            cut_nodes(model, flow)
            flow.restate_selections()
        return changed(model, products)
