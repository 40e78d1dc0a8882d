"""Simplify lookups: `GatherND` by constant positions on one axis becomes `Gather`."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import Tape, add_initializer


class SimplifyLookups(GraphPass[Names]):
    """Replace every `GatherND` that looks up constant positions on the first axis.

    PyTorch's exporter writes `x[..., [2, 3], :]` this way, between two transposes.

    Cases:
        1. The indices are constant and hold one position each, and no axis is a batch: the node becomes `Gather`.
        2. Anything else stays.

    The report has the names of the nodes that became `Gather`.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        simplified = []
        for node in list(model.graph):
            positions = _positions(node)
            if positions is None:
                continue
            name = f"{node.inputs[1].name}.positions" if node.inputs[1] is not None else "positions"
            indices = model.graph.initializers.get(name) or add_initializer(model.graph, name, positions)
            op = Tape()
            op.replace(node, op.op("Gather", [node.inputs[0], indices], {"axis": 0}, name=node.name))
            simplified.append(node.name)
        return changed(model, simplified)


def _positions(node: ir.Node) -> ir.Tensor | None:
    """Case 1: the positions of a node, without the axis that lists one position for each axis of the table."""
    if node.op_type != "GatherND" or node.domain:
        return None
    batch_axes: int = node.attributes.get_int("batch_dims", 0)
    indices = node.inputs[1].const_value if node.inputs[1] is not None else None
    if batch_axes or indices is None or indices.shape[-1] != 1:
        return None
    return ir.Tensor(indices.numpy()[..., 0])
