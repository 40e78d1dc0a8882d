"""Quantize weights inside the graph: write integer weights as floats with a `QuantizeLinear` behind them."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from graph_passes.flow.node_inference import run_constant
from graph_passes.passes.base import GraphPass, ReportedResult


@dataclasses.dataclass(frozen=True)
class WeightsQuantizedInside:
    """What `QuantizeWeightsInside` changed: names of the quantized weights that are floats in the file now."""

    tensors: tuple[str, ...]


class QuantizeWeightsInside(GraphPass[WeightsQuantizedInside]):
    """Let the graph quantize its weights, for runtimes that read no integer weights (TensorRT 8.6).

    Cases:
        1. `DequantizeLinear` of constant integers: a `QuantizeLinear` with the same parameters gives these integers,
           from an initializer of floats. The function stays as it is.
        2. Everything else stays: activations, and quantizers without a zero point, which says the type.
    """

    def call(self, model: ir.Model) -> ReportedResult[WeightsQuantizedInside]:
        tensors = []
        for node in list(model.graph):
            weight = node.inputs[0] if node.op_type == "DequantizeLinear" else None
            has_zero = len(node.inputs) > 2 and node.inputs[2] is not None
            if weight is not None and weight.is_initializer() and has_zero:
                _quantize_inside(model.graph, node, weight)
                tensors.append(str(weight.name))
        for name in set(tensors):
            model.graph.initializers.pop(name)
        return ReportedResult(model, bool(tensors), WeightsQuantizedInside(tuple(dict.fromkeys(tensors))))


def _quantize_inside(graph: ir.Graph, dequantize: ir.Node, weight: ir.Value) -> None:
    """Case 1."""
    contents = {value.name: ir.convenience.get_const_tensor(value) for value in dequantize.inputs if value is not None}
    feeds = {str(name): tensor.numpy() for name, tensor in contents.items() if tensor is not None}
    floats = run_constant(dequantize, feeds).astype(np.float32)
    name = f"{dequantize.outputs[0].name}.float"
    source = ir.Value(
        name=name,
        const_value=ir.Tensor(floats, name=name),
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(floats.shape),
    )
    graph.register_initializer(source)
    attributes = {"axis": dequantize.attributes.get_int("axis", 1)}
    quantize = ir.node("QuantizeLinear", [source, *dequantize.inputs[1:]], attributes, name=f"{name}.quantize")
    output = quantize.outputs[0]
    output.name, output.type, output.shape = f"{name}.quantized", weight.type, weight.shape
    dequantize.replace_input_with(0, output)
    graph.insert_before(dequantize, quantize)
