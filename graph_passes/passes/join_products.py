"""Join products: multiply a tensor by all of its quantized weights at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.passes.quantize_weights import OPERATOR
from graph_passes.tape import Tape, add_initializer, content_of, graph_of, remove_unread, take_over


class JoinProducts(GraphPass[Names]):
    """Replace `MatMulNBits` nodes that read the same tensor by one, whose result is split.

    Each call of the operator rounds the tensor anew and divides its work among the threads, which takes a large part of
    the time of a single token.

    Cases:
        1. Products with weights of equally many bits, such as those of query, key and value: one product.
        2. Products by weights that several nodes read stay, because joined weights would be stored beside them.

    The report has the names of the products that are joined.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        products: dict[tuple[object, ...], list[ir.Node]] = defaultdict(list)
        for node in model.graph:
            if node.op_type == OPERATOR and all(
                len(value.uses()) == 1 for value in node.inputs[1:] if value is not None
            ):
                kind = (node.attributes.get_int(name, 0) for name in ("K", "accuracy_level", "bits", "block_size"))
                products[node.inputs[0], len(node.inputs), *kind].append(node)
        joined = [nodes for nodes in products.values() if len(nodes) > 1]
        for nodes in joined:
            _join(nodes)
        return changed(model, [node.name for nodes in joined for node in nodes])


def _join(nodes: Sequence[ir.Node]) -> None:
    """Replace products of the same tensor by one before the first of them."""
    graph, op = graph_of(nodes[0]), Tape()
    name = "+".join(str(node.name) for node in nodes)
    weights = []
    for position in range(1, len(nodes[0].inputs)):
        content = np.concatenate([content_of(node.inputs[position]) for node in nodes])
        weights.append(add_initializer(graph, f"{name}.{position}", content))
    sizes = [node.attributes.get_int("N", 0) for node in nodes]
    attributes = dict(nodes[0].attributes) | {"N": ir.AttrInt64("N", sum(sizes))}
    product = op.op(OPERATOR, (nodes[0].inputs[0], *weights), attributes, domain=nodes[0].domain, name=name)
    parts = op.op_multi_out("Split", (product, op.ints(sizes)), {"axis": -1}, num_outputs=len(nodes))
    op.insert_before(nodes[0])
    for node, part in zip(nodes, parts, strict=True):
        take_over(node.outputs[0], part)
    unread = [value.name for node in nodes for value in node.inputs[1:] if value is not None]
    graph.remove(nodes, safe=True)
    remove_unread(graph, unread)
