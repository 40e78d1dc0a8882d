"""Where quantizers belong in the graph of a transformer, by TensorRT's rules for explicit quantization.

1. Both inputs of a product with constant weights, with one scale for each output channel of the weights.
2. Both inputs of both products of an attention: queries times keys, and probabilities times values.
3. The input of a residual sum that skips the branch. The other input is the output of a product, whose kernel adds the
   skipped one.
4. Nothing else: neither sums of masks, norms and embeddings, nor the output head, which is every product that the
   outputs depend on directly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import StrEnum

import numpy as np
import onnx_ir as ir

from graph_passes.attention.tracing import LAYOUT, is_computed, product_ahead, product_behind
from graph_passes.tape import add_initializer, ancestors, producer_of

_WEIGHTED = frozenset(("Gemm", "MatMul"))
_PRODUCTS = _WEIGHTED | frozenset(("Attention", "Conv", "GroupQueryAttention", "MultiHeadAttention"))
"""Operators that compute products; a product that one of them depends on is not the output head."""
_MATRIX_AXES = 2


class QuantizedRole(StrEnum):
    """The rule by which an input is quantized."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    ATTENTION = "attention"
    RESIDUAL = "residual"


@dataclasses.dataclass(frozen=True)
class QuantizedInput:
    """An input of a node that is to be quantized.

    Attributes:
        node: the node.
        position: number of the input.
        role: the rule.
    """

    node: ir.Node = dataclasses.field(repr=False)
    position: int
    role: QuantizedRole

    @property
    def value(self) -> ir.Value:
        """The tensor."""
        value = self.node.inputs[self.position]
        assert value is not None
        return value


def quantized_inputs(model: ir.Model) -> list[QuantizedInput]:
    """Every input of the main graph that is to be quantized and is not yet, each once, in the order of the graph.

    Args:
        model: a graph whose weights are initializers at their products (`passes.FoldWeights`).
    """
    inputs: dict[tuple[ir.Node, int], QuantizedInput] = {}
    for node in model.graph:
        for entry in _inputs_of(node):
            if not is_dequantized(entry.value):
                inputs.setdefault((entry.node, entry.position), entry)
    return list(inputs.values())


def is_dequantized(value: ir.Value) -> bool:
    """Whether a tensor is the output of a `DequantizeLinear`."""
    producer = value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def _inputs_of(node: ir.Node) -> Iterator[QuantizedInput]:
    """The inputs that a product, a softmax or a sum causes to be quantized."""
    if is_weighted(node) and not _feeds_output_only(node):  # rule 1
        yield QuantizedInput(node, 0, QuantizedRole.ACTIVATION)
        yield QuantizedInput(node, 1, QuantizedRole.WEIGHT)
    elif node.op_type == "Softmax":  # rule 2
        products = (product_behind(node.inputs[0]), product_ahead(node.outputs[0]))
        if None not in products:
            for product, position in ((product, position) for product in products for position in (0, 1)):
                assert product is not None
                yield QuantizedInput(product, position, QuantizedRole.ATTENTION)
    elif node.op_type == "Add" and (skip := _skip(node)) is not None:  # rule 3
        yield QuantizedInput(node, skip, QuantizedRole.RESIDUAL)


def is_weighted(node: ir.Node) -> bool:
    """Whether a node multiplies an activation by a constant matrix of floats."""
    if node.op_type not in _WEIGHTED or node.domain or not is_computed(node.inputs[0]):
        return False
    weight = node.inputs[1]
    if weight is None or not weight.is_initializer() or weight.is_graph_input():
        return False
    return weight.dtype == ir.DataType.FLOAT and len(weight.shape or ()) == _MATRIX_AXES


def channel_axis(product: ir.Node) -> int:
    """The axis of a product's weights that counts its outputs."""
    return 0 if product.attributes.get_int("transB", 0) else 1


def _feeds_output_only(product: ir.Node) -> bool:
    """Whether every path from a product ends in an output of the graph, without a product or a sum of activations."""
    values, seen = [product.outputs[0]], set()
    while values:
        value = values.pop()
        for node, _ in value.uses():
            if node.op_type in _PRODUCTS or _is_sum(node):
                return False
            if node not in seen:
                seen.add(node)
                values += node.outputs
    return True


def _skip(add: ir.Node) -> int | None:
    """The position at which a residual sum reads the tensor that skips its branch; None for other sums.

    The branch ends in a product that the skipped tensor does not depend on. If both inputs are such branches, the first
    one counts as skipped.
    """
    if not _is_sum(add):
        return None
    for skip, branch in ((0, 1), (1, 0)):
        product = _branch_product(add.inputs[branch])
        if product is not None and product.outputs[0] not in ancestors([add.inputs[skip]]):
            return skip
    return None


def _is_sum(node: ir.Node) -> bool:
    """Whether a node adds two activations."""
    return node.op_type == "Add" and all(_is_activation(value) for value in node.inputs)


def _is_activation(value: ir.Value | None) -> bool:
    is_float = value is not None and (value.dtype is None or value.dtype.is_floating_point())
    return is_float and is_computed(value)


def _branch_product(value: ir.Value | None) -> ir.Node | None:
    """The weighted product that computes a tensor, up to its bias and its layout."""
    while (node := producer_of(value)) is not None:
        if is_weighted(node):
            return node
        if node.op_type in ("Add", "Mul"):
            computed = [operand for operand in node.inputs if is_computed(operand)]
            if len(computed) != 1:
                return None
            value = computed[0]
        elif node.op_type in LAYOUT:
            value = node.inputs[0]
        else:
            return None
    return None


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
