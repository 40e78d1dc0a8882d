"""The quantized products of a graph as graphs of their own, in which each can be computed by itself."""

from __future__ import annotations

import onnx_ir as ir

from compressor.targets.quantized_graph import quantized_products


def activations_graph(model: ir.Model) -> ir.Model:
    """A graph whose outputs are the activations that its quantized products quantize; the model is edited in place."""
    model.graph.outputs[:] = list(_activations(model).values())
    return model


def products_graph(model: ir.Model) -> ir.Model:
    """A graph of the quantized products alone, each with its quantizers.

    Its inputs are the outputs of `activations_graph`; its outputs are those of the products, under their names.

    Args:
        model: the quantized graph, which stays unchanged.
    """
    activations = _activations(model)
    inputs = {
        name: ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
        for name, value in activations.items()
    }
    copies: dict[ir.Value | None, ir.Value | None] = {None: None}
    nodes: list[ir.Node] = []
    constants: list[ir.Value] = []

    def copy(value: ir.Value | None) -> ir.Value | None:
        """The copy of a tensor and of the nodes that compute it from activations and constants."""
        if value in copies or value is None:
            return copies[value]
        producer = value.producer()
        if value.name in inputs:
            copies[value] = inputs[value.name]
        elif producer is None:
            constant = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
            constants.append(constant)
            copies[value] = constant
        else:
            operands = [copy(operand) for operand in producer.inputs]
            node = ir.Node(
                producer.domain, producer.op_type, operands, producer.attributes.values(), name=producer.name
            )
            nodes.append(node)
            for output, original in zip(node.outputs, producer.outputs, strict=True):
                output.name, output.type, output.shape = original.name, original.type, original.shape
                copies[original] = output
        return copies[value]

    outputs = [copy(node.outputs[0]) for node in quantized_products(model)]
    graph = ir.Graph(
        list(inputs.values()),
        [output for output in outputs if output is not None],
        nodes=nodes,
        initializers=constants,
        opset_imports=dict(model.graph.opset_imports),
        name="products",
    )
    return ir.Model(graph, ir_version=model.ir_version)


def _activations(model: ir.Model) -> dict[str, ir.Value]:
    """The float tensors that the first factors of the quantized products are quantized from, by name."""
    tensors: dict[str, ir.Value] = {}
    for node in quantized_products(model):
        value = node.inputs[0]
        while value is not None and (producer := value.producer()) is not None:
            value = producer.inputs[0]
            if producer.op_type == "QuantizeLinear":
                break
        if value is not None and value.name is not None:
            tensors[value.name] = value
    return tensors
