"""Return products to floats: remove the quantizers of chosen products from a quantized graph."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.flow.node_calls import run_constant
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.passes.quantize_weights import OPERATOR
from graph_passes.quantizers.weight_blocks import floats_of_blocks
from graph_passes.tape import Tape, add_initializer, content_of, graph_of, producer_of

_LAYOUT = frozenset(("Reshape", "Transpose"))


class ReturnToFloats(GraphPass[Names]):
    """Let products of a quantized graph read their factors in floats.

    Other readers of a quantized tensor still read it quantized. Weights keep the values that their integers stand for.

    Cases:
        1. A factor is `DequantizeLinear(QuantizeLinear(x))`: the product reads `x`.
        2. A factor is `DequantizeLinear` of constant integers: the product reads the floats, as an initializer.
        3. There are layout operators between the two: they are repeated on the float tensor.
        4. The product is `MatMulNBits`: it becomes `MatMul` with its dequantized weights, as an initializer.

    The report has the names of the products that compute in floats now.
    """

    def __init__(self, products: Collection[str]) -> None:
        self.products = frozenset(products)

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        returned = []
        for node in list(model.graph):
            if node.name in self.products and node.op_type == OPERATOR:
                _multiply_by_floats(node)  # case 4
                returned.append(node.name or "")
            elif node.name in self.products:
                factors = [_float_factor(value, node) for value in node.inputs[:2]]
                for position, factor in enumerate(factors):
                    if factor is not None:
                        node.replace_input_with(position, factor)
                if any(factor is not None for factor in factors):
                    returned.append(node.name)
        if returned:
            common.RemoveUnusedNodesPass()(model)
        return changed(model, returned)


def _float_factor(value: ir.Value | None, reader: ir.Node) -> ir.Value | None:
    """The tensor that a factor is dequantized from, in floats; None if it is not quantized."""
    producer = producer_of(value)
    if value is None or producer is None:
        return None
    if producer.op_type in _LAYOUT:  # case 3
        source = _float_factor(producer.inputs[0], reader)
        if source is None:
            return None
        copy = ir.Node("", producer.op_type, [source, *producer.inputs[1:]], producer.attributes.values())
        graph_of(reader).insert_before(reader, copy)
        copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
        return copy.outputs[0]
    if producer.op_type != "DequantizeLinear" or (quantized := producer.inputs[0]) is None:
        return None
    quantizer = quantized.producer()
    if quantizer is not None and quantizer.op_type == "QuantizeLinear":  # case 1
        return quantizer.inputs[0]
    return _dequantized(producer, reader) if quantized.is_initializer() else None  # case 2


def _multiply_by_floats(node: ir.Node) -> None:
    """Replace a `MatMulNBits` by a `MatMul` under its name."""
    graph, op = graph_of(node), Tape()
    activations, integers, scales = node.inputs[:3]
    name = f"{'' if integers is None else integers.name}.float"
    if (weights := graph.initializers.get(name)) is None:
        bits, inputs = (node.attributes.get_int(attribute) for attribute in ("bits", "K"))
        floats = floats_of_blocks(content_of(integers), content_of(scales), bits, inputs)
        weights = add_initializer(graph, name, floats)
    metadata = dict(node.metadata_props)
    op.replace(node, op.op("MatMul", [activations, weights], name=node.name, metadata_props=metadata))


def _dequantized(node: ir.Node, reader: ir.Node) -> ir.Value:
    """The output of a `DequantizeLinear` of constants, as an initializer."""
    graph = graph_of(reader)
    name = f"{node.outputs[0].name}.float"
    if name in graph.initializers:  # another product reads the same weights
        return graph.initializers[name]
    contents = {str(value.name): content_of(value) for value in node.inputs if value is not None}
    return add_initializer(graph, name, run_constant(node, contents))
