"""The quantized products of a graph as graphs of their own, in which each can be computed by itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from compressor.targets.base import Feeds
from compressor.targets.quantized_graph import quantized_products

PREFIX = "product:"
"""Beginning of the names of the outputs of `products_graph`."""


def names_of(model: ir.Model, outputs: Collection[str]) -> list[str]:
    """Names of the quantized products of a graph whose outputs in `products_graph` are among `outputs`."""
    return [node.name or "" for node in quantized_products(model) if f"{PREFIX}{node.outputs[0].name}" in outputs]


def activations_graph(model: ir.Model) -> ir.Model:
    """A graph whose outputs are the activations that its quantized products quantize; the model is edited in place."""
    model.graph.outputs[:] = list(_activations(model).values())
    return model


def products_graph(model: ir.Model, feeds: Sequence[Feeds] = ()) -> ir.Model:
    """A graph of the quantized products alone, each with its quantizers.

    Its inputs are the outputs of `activations_graph`, and inputs of the model that a product depends on otherwise; its
    outputs are those of the products, named `product:<tensor>`.

    Args:
        model: the quantized graph, which stays unchanged.
        feeds: outputs of `activations_graph` at several sizes. Axes of equal size are fixed in the new graph. Empty:
            the shapes are those that the graph states, if any.
    """
    activations = _activations(model)
    copies: dict[ir.Value | None, ir.Value | None] = {None: None}
    inputs: list[ir.Value] = []
    nodes: list[ir.Node] = []
    constants: list[ir.Value] = []

    def copy(value: ir.Value | None) -> ir.Value | None:
        """The copy of a tensor and of the nodes that compute it from activations and constants."""
        if value in copies or value is None:
            return copies[value]
        name, producer = str(value.name), value.producer()
        if name in activations:
            shape = _common_shape(name, [batch[name].shape for batch in feeds]) if feeds else value.shape
            copies[value] = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
            inputs.append(copies[value])  # type: ignore[arg-type]
        elif producer is not None:
            copy_node(producer)
        else:
            copies[value] = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
            (constants if value.is_initializer() else inputs).append(copies[value])  # type: ignore[arg-type]
        return copies[value]

    def copy_node(node: ir.Node, prefix: str = "") -> ir.Value:
        """The copy of a node; returns its first output."""
        operands = [copy(operand) for operand in node.inputs]
        copied = ir.Node(node.domain, node.op_type, operands, node.attributes.values(), name=node.name)
        nodes.append(copied)
        for output, original in zip(copied.outputs, node.outputs, strict=True):
            output.name, output.type, output.shape = f"{prefix}{original.name}", original.type, original.shape
            if not prefix:
                copies[original] = output
        return copied.outputs[0]

    # A product is copied even if its output is the activation of another one, which is an input.
    outputs = [copy_node(node, PREFIX) for node in quantized_products(model)]
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=constants,
        opset_imports=dict(model.graph.opset_imports),
        name="products",
    )
    return ir.Model(graph, ir_version=model.ir_version)


def _common_shape(name: str, shapes: Sequence[tuple[int, ...]]) -> ir.Shape:
    """The shape of a tensor, with names for the axes that differ."""
    axes = enumerate(zip(*shapes, strict=True))
    return ir.Shape([sizes[0] if len(set(sizes)) == 1 else f"{name}:{axis}" for axis, sizes in axes])


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
