"""Quantize weights inside the graph: write integer weights as floats with a `QuantizeLinear` behind them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.tape import add_initializer, content_of, remove_unread


class QuantizeWeightsInside(GraphPass[Names]):
    """Let the graph quantize its weights, for runtimes that read no integer weights (TensorRT 8.6).

    Cases:
        1. `DequantizeLinear` of constant integers: a `QuantizeLinear` with the same parameters gives these integers,
           from an initializer of floats. The function stays as it is.
        2. Everything else stays: activations, and weights without a zero point, whose type says what to quantize to.

    The report has the names of the quantized weights that are floats in the file now.
    """

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        tensors = []
        for node in list(model.graph):
            weight = node.inputs[0] if node.op_type == "DequantizeLinear" else None
            if weight is not None and len(node.inputs) > 2 and all(map(_is_constant, node.inputs)):
                _quantize_inside(model.graph, node, weight)
                tensors.append(str(weight.name))
        remove_unread(model.graph, tensors)
        return changed(model, dict.fromkeys(tensors))


def _quantize_inside(graph: ir.Graph, dequantize: ir.Node, weight: ir.Value) -> None:
    """Case 1."""
    axis = dequantize.attributes.get_int("axis", 1)
    integers, scales, zeros = map(content_of, dequantize.inputs)
    shape = [-1 if number == axis else 1 for number in range(integers.ndim)] if scales.ndim else []
    floats = (integers.astype(np.float32) - zeros.reshape(shape)) * scales.reshape(shape)
    name = f"{dequantize.outputs[0].name}.float"
    source = add_initializer(graph, name, floats)
    quantize = ir.node("QuantizeLinear", [source, *dequantize.inputs[1:]], {"axis": axis}, name=f"{name}.quantize")
    output = quantize.outputs[0]
    output.name, output.type, output.shape = f"{name}.quantized", weight.type, weight.shape
    dequantize.replace_input_with(0, output)
    graph.insert_before(dequantize, quantize)


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer()
