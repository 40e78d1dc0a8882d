"""Make axes explicit: nodes that select axes by default or by attribute get them as an input."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.flow.edit import set_ints
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import Tape

_ALL = np.iinfo(np.int64).max
"""End of a slice that has no end."""
_STARTS, _AXES = 1, 3
"""Inputs of `Slice`."""


class MakeAxesExplicit(GraphPass[Names]):
    """Rewrite `Shape` and `Slice` nodes whose axes the ONNX parser of TensorRT 8.6 misreads.

    That parser ignores the attributes of `Shape`, which operator set 15 introduced, and returns the whole shape; for a
    `Slice` without axes it assumes all axes of the tensor.

    Cases:
        1. A `Shape` with `start` or `end` becomes a `Shape` of all axes and a `Slice`, which clamps its bounds as
           `Shape` does. Attributes that hold their defaults are removed.
        2. A `Slice` without axes slices the first ones, as many as it has starts: they become a constant input.
        3. The number of starts is unknown: the `Slice` stays.

    The report has the names of the nodes that were rewritten.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        nodes = [node for node in model.graph.all_nodes() if _selects_axes(node) or _lacks_axes(node)]
        if any(map(_lacks_axes, nodes)):
            common.ShapeInferencePass()(model)
        rewritten = [node for node in nodes if (_slice if _selects_axes(node) else _add_axes)(node)]
        return changed(model, (node.name for node in rewritten))

    def ensures(self, model: ir.Model) -> None:
        for node in model.graph.all_nodes():
            if _selects_axes(node):
                raise ir.passes.PostconditionError(f"{node.name}: selects axes by attributes")


def _selects_axes(node: ir.Node) -> bool:
    return node.op_type == "Shape" and not node.domain and not {"start", "end"}.isdisjoint(node.attributes)


def _lacks_axes(node: ir.Node) -> bool:
    is_slice = node.op_type == "Slice" and not node.domain and len(node.inputs) > _STARTS
    return is_slice and (len(node.inputs) <= _AXES or node.inputs[_AXES] is None)


def _slice(node: ir.Node) -> bool:
    """Case 1; the selected axes keep the name of the output."""
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", _ALL)
    node.attributes.pop("start", None)
    node.attributes.pop("end", None)
    if (start, end) != (0, _ALL) and node.graph is not None:
        op = Tape()
        whole = op.op("Shape", node.inputs, name=node.name)
        sliced = op("Slice", whole, *(op.ints([bound]) for bound in (start, end, 0)))
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], op.nodes, node.outputs, [sliced])
    return True


def _add_axes(node: ir.Node) -> bool:
    """Cases 2 and 3; returns whether the node was rewritten."""
    starts = node.inputs[_STARTS]
    count = starts.shape[0] if starts is not None and starts.shape is not None and len(starts.shape) == 1 else None
    if not isinstance(count, int) or node.graph is None:
        return False
    set_ints(node, _AXES, range(count))
    return True
