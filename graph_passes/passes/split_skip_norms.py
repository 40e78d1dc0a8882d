"""Split skip norms: compute the sum of a residual connection and its normalization as two operators."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graph_passes.passes.base import GraphPass, ReportedResult

FUSED_NORM = "SkipLayerNormalization"
"""ONNX Runtime's operator of a sum and its normalization."""
_OUTPUT, _SUM = 0, 3
"""Outputs of the fused operator: the normalized tensor, and the sum before it."""


@dataclasses.dataclass(frozen=True)
class SplitNorms:
    """What `SplitSkipNorms` changed: names of the nodes that were split."""

    nodes: tuple[str, ...]


class SplitSkipNorms(GraphPass[SplitNorms]):
    """Replace ONNX Runtime's `SkipLayerNormalization` by `Sum` and `LayerNormalization`.

    In some releases the fused operator is slower than the two. `Add` in place of `Sum` would be fused again when the
    graph is loaded.

    Cases:
        1. `SkipLayerNormalization` with any of its optional inputs, whose mean and variance nothing reads.
        2. Anything else stays.
    """

    def call(self, model: ir.Model) -> ReportedResult[SplitNorms]:
        nodes = [node for node in list(model.graph) if node.op_type == FUSED_NORM and not _reads_statistics(node)]
        for node in nodes:
            _split(node)
        return ReportedResult(model, bool(nodes), SplitNorms(tuple(node.name or "" for node in nodes)))


def _reads_statistics(node: ir.Node) -> bool:
    return any(output.uses() or output.is_graph_output() for output in node.outputs[1:_SUM])


def _split(node: ir.Node) -> None:
    """Case 1."""
    graph = node.graph
    assert graph is not None
    first, skip, scale, shift, bias = (*node.inputs, None, None)[:5]
    total = ir.node("Sum", [value for value in (first, bias, skip) if value is not None])
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-12
    norm = ir.node(
        "LayerNormalization",
        [total.outputs[0], scale, *([shift] if shift is not None else [])],
        {"axis": -1, "epsilon": epsilon},
    )
    graph.insert_before(node, [total, norm])
    replaced = {_OUTPUT: norm.outputs[0], _SUM: total.outputs[0]}
    for position, value in replaced.items():
        if position >= len(node.outputs) or not node.outputs[position].name:
            continue
        output = node.outputs[position]
        value.name, value.type, value.shape = output.name, output.type, output.shape
        output.name = None
        ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
