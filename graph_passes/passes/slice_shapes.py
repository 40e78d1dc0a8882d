"""Slice shapes: a `Shape` of some axes becomes the shape of all axes and a slice of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from graph_passes.passes.base import GraphPass, ReportedResult

_ALL = np.iinfo(np.int64).max
"""End of a slice that has no end."""


@dataclasses.dataclass(frozen=True)
class SlicedShapes:
    """What `SliceShapes` changed: names of the `Shape` nodes that lost their attributes."""

    nodes: tuple[str, ...]


class SliceShapes(GraphPass[SlicedShapes]):
    """Write a `Shape` with `start` or `end` as a `Shape` of all axes and a `Slice`.

    The ONNX parser of TensorRT 8.6 reads operator set 17 and ignores both attributes, which set 15 introduced: it
    returns the whole shape.

    Cases:
        1. The attributes select some axes: a `Slice` follows, which clamps its bounds as `Shape` does.
        2. The attributes have their defaults: they are removed.
    """

    def call(self, model: ir.Model) -> ReportedResult[SlicedShapes]:
        changed = []
        for node in list(model.graph.all_nodes()):
            if node.op_type == "Shape" and not node.domain and {"start", "end"} & set(node.attributes):
                _slice(node)
                changed.append(node.name or "")
        return ReportedResult(model, bool(changed), SlicedShapes(tuple(changed)))

    def ensures(self, model: ir.Model) -> None:
        for node in model.graph.all_nodes():
            if node.op_type == "Shape" and not node.domain and {"start", "end"} & set(node.attributes):
                raise ir.passes.PostconditionError(f"{node.name}: selects axes")


def _slice(node: ir.Node) -> None:
    """Rewrite one node; the selected axes keep the name of the output."""
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", _ALL)
    node.attributes.pop("start", None)
    node.attributes.pop("end", None)
    if (start, end) == (0, _ALL) or node.graph is None:
        return
    bounds = [ir.node("Constant", [], {"value": ir.tensor(np.array([bound], np.int64))}) for bound in (start, end)]
    whole = ir.node("Shape", list(node.inputs), name=node.name)
    sliced = ir.node("Slice", [whole.outputs[0], *(bound.outputs[0] for bound in bounds)])
    nodes = [whole, *bounds, sliced]
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], nodes, node.outputs, sliced.outputs)
