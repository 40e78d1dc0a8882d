"""Transpose single queries: compute the output of an attention of one query as a product with a column."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.attention.find import find_attention
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import Tape, graph_of

_SWAPPED = (0, 1, 3, 2)


class TransposeSingleQuery(GraphPass[Names]):
    """Rewrite `probabilities values` as `(values^T probabilities^T)^T` where an attention has one query.

    OpenVINO 2026.4 fuses an attention of one query into a kernel that is wrong for a graph in int8 at a fixed shape of
    batch 1: its output differs by its own size. The rewritten product is not fused, and as fast.

    Cases:
        1. The probabilities are `[batch, heads, 1, keys]` for all inputs of the graph: the product is rewritten.
        2. Anything else stays.

    The report has the names of the products that are computed transposed now.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        probe = Probe(model)
        products = []
        for site in find_attention(model):
            product = site.output.producer()
            if product is not None and product.op_type == "MatMul" and _has_one_query(product, probe):
                _transpose(product)
                products.append(product.name)
        return changed(model, products)


def _has_one_query(product: ir.Node, probe: Probe) -> bool:
    """Case 1. A product that was rewritten has the values as its first factor, and the keys are many."""
    shapes = probe.shapes(product.inputs[0])
    return all(shape is not None and len(shape) == 4 and shape[2] == 1 for shape in shapes)


def _transpose(product: ir.Node) -> None:
    op, output = Tape(), product.outputs[0]
    columns = [op("Transpose", factor, perm=_SWAPPED) for factor in reversed(product.inputs)]
    op.insert_before(product)
    for position, column in enumerate(columns):
        product.replace_input_with(position, column)
    row = ir.node("Transpose", [output], {"perm": _SWAPPED})
    row.outputs[0].type, row.outputs[0].shape, output.shape = output.type, output.shape, None
    graph_of(product).insert_after(product, row)
    row.outputs[0].name, output.name = output.name, f"{output.name}.column"
    ir.convenience.replace_all_uses_with(output, row.outputs[0], replace_graph_outputs=True)
    row.replace_input_with(0, output)
