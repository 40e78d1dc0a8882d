"""Scale queries: move the scale of attention scores to the queries, where TensorRT's attention fusion expects it."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import Tape

_SCALES = ("Div", "Mul")
_BEFORE_SOFTMAX = frozenset(("Add", "Cast", "Max", "Reshape", "Where"))
"""Operators that may stand between the scaled scores and their softmax."""


class ScaleQueries(GraphPass[Names]):
    """Rewrite `c * (query key^T)` as `(c * query) key^T` wherever a softmax follows.

    Cases:
        1. `Mul` or `Div` by one constant number, of a product that nothing else reads: the scale moves.
        2. Anything else stays: a scale per head, a product with several readers, or queries that are scaled already.

    The report has the names of the products whose queries are scaled now.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        products = [product for node in list(model.graph) if (product := _move_scale(node)) is not None]
        return changed(model, (product.name for product in products))


def _move_scale(node: ir.Node) -> ir.Node | None:
    """Case 1, if the node is a scale of scores; returns the product whose queries it scales now."""
    graph, operands = node.graph, _scale(node)
    if graph is None or operands is None:
        return None
    scores, scale = operands
    product = scores.producer()
    if product is None or product.op_type != "MatMul" or (query := product.inputs[0]) is None:
        return None
    is_output = scores.is_graph_output() or node.outputs[0].is_graph_output()
    if len(scores.uses()) > 1 or is_output or not _ends_in_softmax(node):
        return None
    op = Tape()
    if not scale.is_initializer():  # The node that computes it may follow the product.
        scale = op("Constant", value=ir.convenience.get_const_tensor(scale))
    scaled = op(node.op_type, query, scale)
    scaled.type, scaled.shape = query.type, query.shape
    op.insert_before(product)
    product.replace_input_with(0, scaled)
    node.outputs[0].replace_all_uses_with(scores)
    graph.remove(node, safe=True)
    return product


def _scale(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The tensor that a `Mul` or `Div` scales, and the one constant number that scales it."""
    if node.op_type not in _SCALES or node.domain:
        return None
    first, second = node.inputs
    for scaled, scale in ((first, second), (second, first))[: 1 if node.op_type == "Div" else 2]:
        constant = ir.convenience.get_const_tensor(scale) if scale is not None else None
        if scaled is None or scale is None or constant is None:
            continue
        if constant.size == 1 and len(constant.shape) <= 1:  # More axes could widen the tensor by broadcasting.
            return scaled, scale
    return None


def _ends_in_softmax(node: ir.Node) -> bool:
    """Whether every path from a node ends in a softmax."""
    readers = list(_readers(node))
    return bool(readers) and all(
        reader.op_type == "Softmax" or (reader.op_type in _BEFORE_SOFTMAX and _ends_in_softmax(reader))
        for reader in readers
    )


def _readers(node: ir.Node) -> Iterator[ir.Node]:
    return (use.node for output in node.outputs for use in output.uses())
