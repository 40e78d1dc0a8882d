"""Name squeezed axes: a `Squeeze` of all axes of size one says which these are."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.flow.edit import set_ints
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed


class NameSqueezedAxes(GraphPass[Names]):
    """Name the axes that a `Squeeze` without axes removes for any batch: with one row it would remove the batch too.

    Exporters write `tensor.squeeze()` so, after they have traced a batch of several rows.

    Cases:
        1. Some axes have size one: they become a constant input.
        2. No axis has: the node becomes an `Identity`.
        3. The shape is unknown, or has no free axis, or the node has axes: it stays.

    The report has the names of the nodes that were rewritten.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        nodes = [node for node in model.graph.all_nodes() if _removes_any_axis(node)]
        for node in nodes:
            _name_axes(node)
        return changed(model, (node.name for node in nodes))


def _removes_any_axis(node: ir.Node) -> bool:
    if node.op_type != "Squeeze" or node.domain or node.inputs[0] is None:
        return False
    shape = node.inputs[0].shape
    has_axes = "axes" in node.attributes or any(value is not None for value in node.inputs[1:])
    return shape is not None and not shape.is_static() and not has_axes


def _name_axes(node: ir.Node) -> None:
    source = node.inputs[0]
    assert source is not None
    assert source.shape is not None
    axes = [axis for axis, dim in enumerate(source.shape) if dim == 1]
    if not axes:  # case 2
        node.op_type = "Identity"
        node.resize_inputs(1)
        return
    set_ints(node, 1, axes)  # case 1
