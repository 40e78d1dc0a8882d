"""The matrix products with constant weights of a graph, and which of them are quantized."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

_PRODUCTS = frozenset(("Gemm", "MatMul", "FusedMatMul", "Attention"))
"""Operators that multiply by a matrix of weights; `Attention` of ONNX Runtime projects queries, keys and values."""
_THROUGH = frozenset(("Reshape", "Transpose"))
"""Operators that may stand between a dequantized tensor and its product."""


def weighted_products(model: ir.Model) -> list[ir.Node]:
    """The products of the main graph that multiply by constant float weights, quantized or not."""
    return [node for node in model.graph if node.op_type in _PRODUCTS and _weights(node) is not None]


def quantized_products(model: ir.Model) -> list[ir.Node]:
    """The products with constant weights whose factors both are outputs of `DequantizeLinear`."""
    return [
        node
        for node in weighted_products(model)
        if _dequantizer(node.inputs[0]) is not None and _dequantizer(node.inputs[1]) is not None
    ]


def float_products(model: ir.Model) -> list[ir.Node]:
    """The products with constant weights that are not quantized."""
    quantized = set(quantized_products(model))
    return [node for node in weighted_products(model) if node not in quantized]


def _weights(node: ir.Node) -> ir.Value | None:
    """The constant matrix that a product multiplies by: an initializer, dequantized or not."""
    factor = node.inputs[1] if len(node.inputs) > 1 else None
    dequantizer = _dequantizer(factor)
    value = dequantizer.inputs[0] if dequantizer is not None else factor
    constant = next((upstream for upstream in _upstream(value) if upstream.is_initializer()), None)
    if constant is None or constant.shape is None or len(constant.shape) != 2:
        return None
    is_float = constant.dtype is not None and constant.dtype.is_floating_point()
    return constant if is_float or dequantizer is not None else None


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    """The `DequantizeLinear` that computes a tensor, up to its layout."""
    producers = (upstream.producer() for upstream in _upstream(value))
    return next((node for node in producers if node is not None and node.op_type == "DequantizeLinear"), None)


def _upstream(value: ir.Value | None) -> Iterator[ir.Value]:
    """A tensor, and those that it is a transposed or reshaped copy of."""
    while value is not None:
        yield value
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and producer.op_type in _THROUGH else None
