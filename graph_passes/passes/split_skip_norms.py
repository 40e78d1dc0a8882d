"""Split skip norms: compute the sum of a residual connection and its normalization as two operators."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import Tape, take_over

FUSED_NORM = "SkipLayerNormalization"
"""ONNX Runtime's operator of a sum and its normalization."""
_SUM = 3
"""Output of the fused operator that is the sum before the norm; its first output is the normalized tensor."""


class SplitSkipNorms(GraphPass[Names]):
    """Replace ONNX Runtime's `SkipLayerNormalization` by `Sum` and `LayerNormalization`.

    In some releases the fused operator is slower than the two. `Add` in place of `Sum` would be fused again when the
    graph is loaded.

    Cases:
        1. `SkipLayerNormalization` with any of its optional inputs, whose mean and variance nothing reads.
        2. Anything else stays.

    The report has the names of the nodes that were split.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        nodes = [node for node in list(model.graph) if node.op_type == FUSED_NORM and not _reads_statistics(node)]
        for node in nodes:
            _split(node)
        return changed(model, [node.name for node in nodes])


def _reads_statistics(node: ir.Node) -> bool:
    return any(output.uses() or output.is_graph_output() for output in node.outputs[1:_SUM])


def _split(node: ir.Node) -> None:
    """Case 1."""
    op = Tape()
    first, skip, scale, shift, bias = (*node.inputs, None, None)[:5]
    total = op("Sum", *(value for value in (first, bias, skip) if value is not None))
    epsilon = node.attributes.get_float("epsilon", 1e-12)
    norm = op("LayerNormalization", total, scale, *([shift] if shift is not None else []), axis=-1, epsilon=epsilon)
    if len(node.outputs) > _SUM and node.outputs[_SUM].name:
        take_over(node.outputs[_SUM], total)
    op.replace(node, norm)
