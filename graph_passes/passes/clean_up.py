"""Clean up after shrinking: gates of one, shapes that say too much, constants and nodes that nobody reads."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.attention.gates import SUFFIX
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.flow.shape_inputs import set_shape_input


class CleanUp(ir.passes.InPlacePass):
    """Leave a graph that reads as if it had been exported at its new size.

    Cases:
        1. A product with a gate of ones is the other factor.
        2. A shape input that only copies or states sizes becomes a constant.
        3. Identities, unread nodes, initializers, functions and opsets go.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed = _remove_unit_gates(model.graph)
        probe = Probe(model)
        for node in list(model.graph):
            if node.op_type in ("Reshape", "Expand") and node.domain == "":
                changed |= set_shape_input(node, node.inputs[0], None, probe)
        rest = ir.passes.Sequential(
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.IdentityEliminationPass(),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),
            common.RemoveUnusedOpsetsPass(),
        )(model)
        return ir.passes.PassResult(model, changed or rest.modified)


def _remove_unit_gates(graph: ir.Graph) -> bool:
    changed = False
    for node in list(graph):
        if node.op_type != "Mul":
            continue
        for gate, other in (tuple(node.inputs), tuple(reversed(node.inputs))):
            if gate is None or other is None or not gate.is_initializer() or not (gate.name or "").endswith(SUFFIX):
                continue
            if gate.const_value is not None and np.all(gate.const_value.numpy() == 1):
                ir.convenience.replace_all_uses_with(node.outputs[0], other, replace_graph_outputs=True)
                graph.remove(node, safe=True)
                changed = True
                break
    return changed
