"""The products of a graph with weights, in which heads and neurons end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from graph_passes.attention.site_names import module_path
from graph_passes.attention.tracing import KEEPS_ELEMENTS, PRODUCTS, is_computed
from graph_passes.flow.concrete_shapes import Probe

_KEEPS_UNITS = KEEPS_ELEMENTS | {"DequantizeLinear"}
"""Operators between an initializer and the product that reads it as its weight."""


@dataclasses.dataclass(frozen=True)
class GraphProduct:
    """A product of an activation with a weight of two axes, or a convolution of single pixels.

    Attributes:
        node: the product.
        position: position of the activation among its inputs.
        axis: the axis of the activation that is summed over, counted from the last.
        units: size of that axis.
        weight: the initializer of the weight.
    """

    node: ir.Node
    position: int
    axis: int
    units: int
    weight: ir.Value

    @property
    def path(self) -> str | None:
        """Path of the module that the product was exported from, by its scope or the name of its weight, or None."""
        return module_path(self.node) or (self.weight.name or "").rpartition(".")[0] or None

    def __str__(self) -> str:
        return self.node.name or self.weight.name or "a nameless one"


def find_products(model: ir.Model, probe: Probe) -> list[GraphProduct]:
    """The products of activations with weights, in the order of the graph. Those of unknown shapes are left out."""
    return [product for node in model.graph for product in _products_of(node, probe)]


def _products_of(node: ir.Node, probe: Probe) -> Iterator[GraphProduct]:
    """The product that a node is; none, if it is another operator or multiplies no weight."""
    if node.op_type == "Conv":
        weight, shape = weight_of(node.inputs[1]), probe.shape(node.inputs[0])
        kernel = None if weight is None or weight.const_value is None else weight.const_value.shape.numpy()
        is_pointwise = kernel is not None and all(size == 1 for size in kernel[2:])
        if weight is not None and shape is not None and is_pointwise and node.attributes.get_int("group", 1) == 1:
            yield GraphProduct(node, 0, 1 - len(shape), shape[1], weight)
        return
    if node.op_type not in PRODUCTS or any(node.attributes.get_int(f"transBatch{side}", 0) for side in "AB"):
        return
    for position in range(2):
        weight, activation = weight_of(node.inputs[1 - position]), node.inputs[position]
        shape = probe.shape(activation)
        if weight is None or weight.const_value is None or len(weight.const_value.shape) != 2:
            continue
        if shape is None or len(shape) < 2 or not is_computed(activation):
            continue
        transposed = bool(node.attributes.get_int("transB" if position else "transA", 0))
        axis = -1 if transposed == bool(position) else -2
        yield GraphProduct(node, position, axis, shape[axis], weight)


def weight_of(value: ir.Value | None) -> ir.Value | None:
    """The initializer that an operand holds, as it is, converted, transposed or dequantized; None: it is computed."""
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or node.op_type not in _KEEPS_UNITS:
            return None
        value = node.inputs[0]
    return value if value is not None and value.const_value is not None else None
