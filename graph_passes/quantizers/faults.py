"""Check the quantizers of a graph: their place, their form, and the operator set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import StrEnum

import numpy as np
import onnx_ir as ir

from graph_passes.quantizers.placement import channel_axis, is_dequantized, quantized_inputs, without_quantizers
from graph_passes.tape import input_of

FP8 = ir.DataType.FLOAT8E4M3FN
FP8_OPSET = 21
"""First operator set whose quantizers name their type, as fp8 needs."""
_TYPES = (ir.DataType.INT8, FP8)


class QuantizerRule(StrEnum):
    """TensorRT's rules for the quantizers of a graph."""

    PLACED = "placed"
    """Every input that is to be quantized reads a dequantized tensor."""
    ONLY_PLACED = "only-placed"
    """No other input reads a dequantized tensor."""
    SYMMETRIC = "symmetric"
    """Zero points are zero."""
    TYPE = "type"
    """Tensors are quantized to int8 or to fp8 (E4M3)."""
    SCALE = "scale"
    """Scales are constant and positive: one for an activation, one for each output channel of weights."""
    OPSET = "opset"
    """fp8 needs operator set 21."""


@dataclasses.dataclass(frozen=True)
class QuantizerFault:
    """A rule that a graph breaks.

    Attributes:
        rule: the rule.
        node: name of the node that breaks it.
        position: number of its input, for rules about places; None for all other rules.
    """

    rule: QuantizerRule
    node: str
    position: int | None = None

    def __str__(self) -> str:
        where = self.node if self.position is None else f"{self.node}, input {self.position}"
        return f"{where}: {self.rule}"


def quantizer_faults(model: ir.Model) -> list[QuantizerFault]:
    """Every rule that the quantizers of a graph break, in their form and in their place; empty for a graph of
    `passes.InsertQuantizers`.

    Args:
        model: the graph, which stays unchanged.
    """
    return [*form_faults(model), *_placement_faults(model)]


def form_faults(model: ir.Model) -> list[QuantizerFault]:
    """The rules about zero points, types, scales and the operator set that a graph breaks, wherever its quantizers are.

    Args:
        model: the graph, which stays unchanged.
    """
    nodes = [node for node in model.graph if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    faults = [QuantizerFault(rule, node.name or "") for node in nodes for rule in _broken_rules(node)]
    opset = model.opset_imports.get("", 0)
    if opset < FP8_OPSET and any(_element_type(node) == FP8 for node in nodes):
        faults.append(QuantizerFault(QuantizerRule.OPSET, model.graph.name or ""))
    return faults


def _broken_rules(node: ir.Node) -> Iterator[QuantizerRule]:
    """The rules about its form that a quantizer breaks."""
    if _element_type(node) not in _TYPES:
        yield QuantizerRule.TYPE
    zero = _content(node, 2)
    if input_of(node, 2) is not None and (zero is None or zero.astype(np.float32).any()):
        yield QuantizerRule.SYMMETRIC
    scale = _content(node, 1)
    if scale is None or not (scale > 0).all() or scale.shape != _scale_shape(node):
        yield QuantizerRule.SCALE


def _element_type(node: ir.Node) -> ir.DataType | None:
    """The type that a quantizer writes, or that a dequantizer reads."""
    if node.op_type == "DequantizeLinear":
        return None if node.inputs[0] is None else node.inputs[0].dtype
    if stated := node.attributes.get_int("output_dtype", 0):
        return ir.DataType(stated)
    zero = input_of(node, 2)
    return ir.DataType.UINT8 if zero is None else zero.dtype


def _scale_shape(node: ir.Node) -> tuple[int, ...]:
    """The shape that the scale must have: a number for each output channel of constant weights, else one number."""
    source = node.inputs[0]
    product = _reader(node)
    if source is None or not source.is_initializer() or product is None or source.shape is None:
        return ()
    return (source.shape.numpy()[channel_axis(product)],)


def _reader(node: ir.Node) -> ir.Node | None:
    """The first node that reads the tensor of a quantizer, dequantized."""
    for reader, _ in node.outputs[0].uses():
        return _reader(reader) if reader.op_type == "DequantizeLinear" else reader
    return None


def _content(node: ir.Node, position: int) -> np.ndarray | None:
    """The content of a constant input."""
    value = input_of(node, position)
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def _placement_faults(model: ir.Model) -> Iterator[QuantizerFault]:
    """The inputs that read floats where they are to be quantized, and the other way round."""
    quantized = {
        (node.name, position)
        for node in model.graph
        for position, value in enumerate(node.inputs)
        if node.op_type != "DequantizeLinear" and value is not None and is_dequantized(value)
    }
    expected = {(entry.node.name, entry.position) for entry in quantized_inputs(without_quantizers(model))}
    for rule, inputs in (
        (QuantizerRule.PLACED, expected - quantized),
        (QuantizerRule.ONLY_PLACED, quantized - expected),
    ):
        yield from (QuantizerFault(rule, name or "", position) for name, position in sorted(inputs, key=str))
