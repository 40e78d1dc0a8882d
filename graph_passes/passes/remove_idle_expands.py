"""Remove idle expands: each `Expand` to the shape that its input already has."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.flow.concrete_shapes import Probe
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed


class RemoveIdleExpands(GraphPass[Names]):
    """Remove every `Expand` whose output has its input's shape for all sizes of the graph's inputs.

    onnxscript's fusion rules insert one before each attention mask, which then copies whole attention maps.

    Cases:
        1. Input and output have equal shapes at both sizes that `Probe` tries: readers of the output read the input.
        2. The shapes differ or are unknown, or the output is an output of the graph: the node stays.

    The report has the names of the nodes removed.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        probe = Probe(model)
        removed = []
        for node in list(model.graph):
            if node.op_type == "Expand" and not node.domain and None not in probe.shapes(node.inputs[0]):
                source, expanded = node.inputs[0], node.outputs[0]
                same_shape = probe.shapes(source) == probe.shapes(expanded)
                if source is not None and same_shape and not expanded.is_graph_output():
                    expanded.replace_all_uses_with(source)
                    model.graph.remove(node, safe=True)
                    removed.append(node.name)
        unused = common.RemoveUnusedNodesPass()(model).modified
        return changed(model, removed, is_other=unused)
