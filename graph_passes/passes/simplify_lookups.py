"""Simplify lookups: `GatherND` by constant positions on one axis becomes `Gather`."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graph_passes.passes.base import GraphPass, ReportedResult


@dataclasses.dataclass(frozen=True)
class SimplifiedLookups:
    """What `SimplifyLookups` changed: names of the nodes that became `Gather`."""

    nodes: tuple[str, ...]


class SimplifyLookups(GraphPass[SimplifiedLookups]):
    """Replace every `GatherND` that looks up constant positions on the first axis.

    PyTorch's exporter writes `x[..., [2, 3], :]` this way, between two transposes.

    Cases:
        1. The indices are constant and hold one position each, and no axis is a batch: the node becomes `Gather`.
        2. Anything else stays.
    """

    def call(self, model: ir.Model) -> ReportedResult[SimplifiedLookups]:
        simplified = []
        for node in list(model.graph):
            positions = _positions(node)
            if positions is None:
                continue
            name = f"{node.inputs[1].name}.positions" if node.inputs[1] is not None else "positions"
            value = ir.Value(name=name, const_value=positions, type=ir.TensorType(positions.dtype))
            value.shape = positions.shape
            if name not in model.graph.initializers:
                model.graph.register_initializer(value)
            output = node.outputs[0]
            gather = ir.node("Gather", [node.inputs[0], model.graph.initializers[name]], {"axis": 0}, name=node.name)
            result = gather.outputs[0]
            result.type, result.shape = output.type, output.shape
            model.graph.insert_before(node, gather)
            output.replace_all_uses_with(result, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
            result.name = output.name
            simplified.append(node.name or "")
        return ReportedResult(model, bool(simplified), SimplifiedLookups(tuple(simplified)))


def _positions(node: ir.Node) -> ir.Tensor | None:
    """Case 1: the positions of a node, without the axis that lists one position for each axis of the table."""
    if node.op_type != "GatherND" or node.domain:
        return None
    batch_axes: int = node.attributes.get_int("batch_dims", 0)
    indices = node.inputs[1].const_value if node.inputs[1] is not None else None
    if batch_axes or indices is None or indices.shape[-1] != 1:
        return None
    return ir.Tensor(indices.numpy()[..., 0])
