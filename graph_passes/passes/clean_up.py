"""Clean up after shrinking: remove gates of ones and unused nodes and constants, and make computed shapes constant."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.attention.gate_initializers import gated_group
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.rule import RuleContext
from graph_passes.flow.shape_inputs import ShapeInput
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed


class CleanUp(GraphPass[Names]):
    """Leave a graph that reads as if it had been exported at its new size.

    Cases:
        1. A product with a gate of ones is replaced by its other factor.
        2. A shape input that copies sizes of the node's data, or is the same for every input, becomes a constant.
        3. Identities are removed, except between two outputs and where a body returns an outer tensor, and so are
           nodes, initializers, functions and opset imports that nothing uses.
        4. A value in the body of a loop gets another name if a new constant of the graph has its name.

    The report has the names of the gates that were removed, and of the nodes whose shape input became a constant.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        unit_gates = _remove_unit_gates(model.graph)
        context = RuleContext(Probe(model))
        shapes = [
            node.name
            for node in list(model.graph)
            if node.op_type in ("Reshape", "Expand") and node.domain == "" and ShapeInput(node, (), (), context).write()
        ]
        unused = ir.passes.Sequential(
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            _EliminateIdentities(),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),
            common.RemoveUnusedOpsetsPass(),
            _SeparateNames(),
        )(model)
        return changed(model, [*unit_gates, *shapes], is_other=unused.modified)


class _EliminateIdentities(common.IdentityEliminationPass):
    """Eliminate identities, except those that give an output of a graph a name of its own.

    They are those between two outputs, to which onnx-ir would give a single name, and those by which a body returns a
    tensor of the graph around it, which no body may do directly.
    """

    def _try_eliminate_identity_node(self, node: ir.Node) -> bool:
        names_output = any(
            value is not None and (value.is_graph_output() or value.graph is not node.graph) for value in node.inputs
        ) and any(value.is_graph_output() for value in node.outputs)
        return not names_output and super()._try_eliminate_identity_node(node)


class _SeparateNames(common.NameFixPass):
    """Make names unique in graphs with bodies, since new values are named without regard to the bodies."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        has_bodies = next(iter(model.graph.subgraphs()), None) is not None
        return super().call(model) if has_bodies else ir.passes.PassResult(model, modified=False)


def _remove_unit_gates(graph: ir.Graph) -> list[str | None]:
    """Case 1; returns the names of the gates."""
    removed = []
    for node in list(graph):
        if node.op_type != "Mul":
            continue
        for gate, factor in (tuple(node.inputs), tuple(reversed(node.inputs))):
            if gate is not None and factor is not None and _is_unit_gate(gate):
                _bypass(graph, node, factor)
                removed.append(gate.name)
                break
    return removed


def _bypass(graph: ir.Graph, product: ir.Node, factor: ir.Value) -> None:
    """Let the readers of a product read one factor. An output of the graph keeps its name and type."""
    output = product.outputs[0]
    if output.is_graph_output():
        identity = ir.node("Identity", [factor])  # The elimination of identities decides whether it can be removed.
        graph.insert_before(product, identity)
        factor = identity.outputs[0]
        factor.type, factor.shape = output.type, output.shape
        factor.name, output.name = output.name, None
    ir.convenience.replace_all_uses_with(output, factor, replace_graph_outputs=True)
    graph.remove(product, safe=True)


def _is_unit_gate(value: ir.Value) -> bool:
    """Whether a tensor is a gate whose elements are all one."""
    if gated_group(value) is None or value.const_value is None:
        return False
    return bool(np.all(value.const_value.numpy() == 1))
