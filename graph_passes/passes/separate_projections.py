"""Separate projections: compute queries, keys and values of a fused attention as a product of its own."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.attention.operands import SCORE_BIAS, has_score_bias
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import Tape, content_of

_INPUTS = (0, 1, 2, SCORE_BIAS)
"""Inputs of `Attention` that are carried over: rows, weights, bias of the projections, and bias of the scores."""
_ATTRIBUTES = frozenset(("num_heads", "unidirectional", "scale", "mask_filter_value"))
"""Attributes that both operators have."""
_SIZES = "qkv_hidden_sizes"


class SeparateProjections(GraphPass[Names]):
    """Replace ONNX Runtime's `Attention` by `MatMul`, `Split` and `MultiHeadAttention` where its scores have a bias.

    onnxruntime's quantizer turns `Attention` into `QAttention`, which has no input for such a bias, e.g. a mask.

    Cases:
        1. `Attention` with constant weights and a bias of the scores: it is replaced.
        2. One that also reads a cache or lengths of rows, or writes a cache: it stays.
        3. One without a bias of the scores stays.

    The report has the names of the attentions, which are those of the products now.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        nodes = [node for node in list(model.graph) if has_score_bias(node) and _can_be_separated(node)]
        for node in nodes:
            _separate(node)
        return changed(model, [node.name for node in nodes])


def _can_be_separated(node: ir.Node) -> bool:
    """Case 1."""
    weights = node.inputs[1]
    return (
        weights is not None
        and weights.const_value is not None
        and all(value is None for position, value in enumerate(node.inputs) if position not in _INPUTS)
        and not any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
        and node.attributes.keys() <= _ATTRIBUTES | {_SIZES}
    )


def _separate(node: ir.Node) -> None:
    rows, weights, bias, score_bias = (node.inputs[position] for position in _INPUTS)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    sizes = attributes.pop(_SIZES, None) or [content_of(weights).shape[1] // 3] * 3
    op = Tape()
    lengths, product = op.ints(sizes), op.op("MatMul", [rows, weights], name=node.name)
    parts = op.op_multi_out("Split", [product, lengths], {"axis": -1}, num_outputs=3)
    operands, name = [*parts, bias, None, score_bias], f"{node.name}.attention"
    attention = op.op("MultiHeadAttention", operands, attributes, domain=node.domain, name=name)
    for number, value in enumerate((lengths, product, *parts)):
        value.name = f"{node.outputs[0].name}.projections{number}"
    op.replace(node, attention)
