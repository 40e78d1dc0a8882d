"""Scale queries: the scale of a product ahead of a softmax moves to its left side, where fusions of attention look."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

_SCALES = ("Div", "Mul")
_BETWEEN = frozenset(("Add", "Cast", "Max", "Reshape", "Where"))
"""What may stand between the scaled scores and their softmax."""


class ScaleQueries(ir.passes.InPlacePass):
    """Rewrite `c * (query key^T)` as `(c * query) key^T` wherever a softmax follows.

    Cases:
        1. `Mul` or `Div` by one constant number, on a product that nobody else reads: moved.
        2. Any other is left: a scale of each head, a product that is read twice, a graph that scales queries already.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        moved = [node for node in list(model.graph) if _move(node)]
        return ir.passes.PassResult(model, bool(moved))


def _move(node: ir.Node) -> bool:
    """Whether the node is a scale of scores, which then has moved."""
    graph, found = node.graph, _scale(node)
    if graph is None or found is None:
        return False
    scores, scale = found
    product = scores.producer()
    if product is None or product.op_type != "MatMul" or (query := product.inputs[0]) is None:
        return False
    if len(scores.uses()) > 1 or scores.is_graph_output() or node.outputs[0].is_graph_output() or not _is_scores(node):
        return False
    if not scale.is_initializer():  # the node that gives it may stand behind the product
        own = ir.node("Constant", [], {"value": ir.convenience.get_const_tensor(scale)})
        graph.insert_before(product, own)
        scale = own.outputs[0]
    scaled = ir.node(node.op_type, [query, scale])
    scaled.outputs[0].type, scaled.outputs[0].shape = query.type, query.shape
    graph.insert_before(product, scaled)
    product.replace_input_with(0, scaled.outputs[0])
    node.outputs[0].replace_all_uses_with(scores)
    graph.remove(node, safe=True)
    return True


def _scale(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """What a `Mul` or `Div` scales, and the one constant number that it does so by."""
    if node.op_type not in _SCALES or node.domain not in ("", "ai.onnx"):
        return None
    first, second = node.inputs
    for scaled, scale in ((first, second), (second, first))[: 1 if node.op_type == "Div" else 2]:
        constant = ir.convenience.get_const_tensor(scale) if scale is not None else None
        if scaled is None or scale is None or constant is None:
            continue
        if constant.size == 1 and len(constant.shape) <= 1:  # of more axes it could widen what it scales
            return scaled, scale
    return None


def _is_scores(node: ir.Node) -> bool:
    """Whether all that reads a node ends in a softmax."""
    following = list(_following(node))
    return bool(following) and all(
        after.op_type == "Softmax" or (after.op_type in _BETWEEN and _is_scores(after)) for after in following
    )


def _following(node: ir.Node) -> Iterator[ir.Node]:
    return (use.node for output in node.outputs for use in output.uses())
