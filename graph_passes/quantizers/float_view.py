"""The float graph behind a quantized one, to look for products, attentions and sums in."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.tape import add_initializer


def without_quantizers(model: ir.Model) -> ir.Model:
    """A copy of a graph in which every reader of a dequantized tensor reads floats.

    Nodes keep their names. Weights have their type and shape, but not their content.
    """
    copy = model.clone()
    for node in list(copy.graph):
        if node.op_type != "DequantizeLinear" or (quantized := node.inputs[0]) is None:
            continue
        quantizer = quantized.producer()
        if quantizer is not None and quantizer.op_type == "QuantizeLinear":
            source = quantizer.inputs[0]
        elif quantized.is_initializer():
            source = _float_weight(copy.graph, quantized)
        else:
            continue  # a lookup in quantized weights: its floats are computed already
        if source is not None:
            ir.convenience.replace_all_uses_with(node.outputs[0], source, replace_graph_outputs=True)
            copy.graph.remove(node, safe=True)
    return copy


def _float_weight(graph: ir.Graph, quantized: ir.Value) -> ir.Value:
    """An initializer of floats in place of quantized weights; its content does not matter."""
    name, shape = f"{quantized.name}.float", quantized.shape
    assert shape is not None
    graph.initializers.pop(name, None)
    return add_initializer(graph, name, np.broadcast_to(np.float32(0), shape.numpy()))
