"""Insert quantizers: pairs of `QuantizeLinear` and `DequantizeLinear` where TensorRT expects them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graph_passes.passes.base import GraphPass, ReportedResult, require_inlined
from graph_passes.quantizers.faults import FP8, FP8_OPSET
from graph_passes.quantizers.placement import QuantizedRole, channel_axis, quantized_inputs
from graph_passes.tape import add_initializer, content_of, remove_unread

LARGEST: Mapping[ir.DataType, float] = {ir.DataType.INT8: 127.0, FP8: 448.0}
"""Largest number of each element type that a range is mapped to; for int8 the same on both sides of zero."""


@dataclasses.dataclass(frozen=True)
class InsertedQuantizers:
    """What `InsertQuantizers` changed.

    Attributes:
        tensors: names of the activations that are quantized.
        weights: names of the quantized weights.
        inputs: number of inputs of nodes that read quantized tensors, by role.
    """

    tensors: tuple[str, ...]
    weights: tuple[str, ...]
    inputs: Mapping[QuantizedRole, int]


class InsertQuantizers(GraphPass[InsertedQuantizers]):
    """Quantize a float graph symmetrically, in int8 or in fp8 (E4M3): every zero point is zero.

    Cases:
        1. An activation gets one pair with one scale, which every input to be quantized reads
           (`quantizers.placement.quantized_inputs`); other readers still read the floats.
        2. Weights become constants of the element type, with one scale for each output channel, and one
           `DequantizeLinear`. Weights that several products read along the same axis are quantized once.
        3. In int8 the zero points are written; in fp8 `QuantizeLinear` names its type instead.

    Args:
        ranges: activation -> largest magnitude that is represented; larger ones saturate.
        element_type: `INT8` or `FLOAT8E4M3FN`.

    Raises:
        ValueError: the element type is not supported.
    """

    def __init__(self, ranges: Mapping[str, float], element_type: ir.DataType = ir.DataType.INT8) -> None:
        if element_type not in LARGEST:
            raise ValueError(f"{element_type}: quantizers are of type INT8 or FLOAT8E4M3FN")
        self.ranges, self.element_type = ranges, element_type

    def requires(self, model: ir.Model) -> None:
        require_inlined(model)
        if self.element_type == FP8 and model.opset_imports.get("", 0) < FP8_OPSET:
            raise ir.passes.PreconditionError(f"fp8 needs operator set {FP8_OPSET}; convert the graph first")
        names = {str(entry.value.name) for entry in quantized_inputs(model) if entry.role is not QuantizedRole.WEIGHT}
        if unknown := names - self.ranges.keys():
            raise ir.passes.PreconditionError(f"{min(unknown)}: its range is missing")

    def call(self, model: ir.Model) -> ReportedResult[InsertedQuantizers]:
        graph = model.graph
        dequantized: dict[tuple[str, int | None], ir.Value] = {}
        roles = dict.fromkeys(QuantizedRole, 0)
        for entry in quantized_inputs(model):
            is_weight = entry.role is QuantizedRole.WEIGHT
            axis = channel_axis(entry.node) if is_weight else None
            key = str(entry.value.name), axis
            if key not in dequantized:
                dequantized[key] = (
                    self._quantize_activation(graph, entry.value)
                    if axis is None
                    else self._quantize_weight(graph, entry.node, entry.value, axis)
                )
            entry.node.replace_input_with(entry.position, dequantized[key])
            roles[entry.role] += 1
        remove_unread(graph, [name for name, axis in dequantized if axis is not None])
        tensors, weights = (
            tuple(name for name, axis in dequantized if (axis is None) is activations) for activations in (True, False)
        )
        return ReportedResult(model, bool(dequantized), InsertedQuantizers(tensors, weights, roles))

    def _quantize_activation(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        """Cases 1 and 3: a pair right after the tensor; returns the dequantized tensor."""
        name = str(value.name)
        scale = add_initializer(graph, f"{name}.scale", self._scale(np.float32(self.ranges[name])))
        attributes = {"output_dtype": int(FP8)} if self.element_type == FP8 else {}
        parameters = [scale, *self._zero_point(graph, f"{name}.zero_point", ())]
        quantize = ir.node("QuantizeLinear", [value, *parameters], attributes, name=f"{name}.quantize")
        dequantize = _dequantizer(name, quantize.outputs[0], parameters, value)
        quantize.outputs[0].name = f"{name}.quantized"
        quantize.outputs[0].type, quantize.outputs[0].shape = ir.TensorType(self.element_type), value.shape
        producer = value.producer()
        if producer is None:
            graph.insert_before(graph[0], [quantize, dequantize])
        else:
            graph.insert_after(producer, [quantize, dequantize])
        return dequantize.outputs[0]

    def _quantize_weight(self, graph: ir.Graph, product: ir.Node, weight: ir.Value, axis: int) -> ir.Value:
        """Cases 2 and 3: constants of the element type, dequantized before the product."""
        name, content = f"{weight.name}.{axis}", content_of(weight)
        scales = self._scale(np.abs(content).max(axis=1 - axis, initial=0.0))
        scaled = content / np.expand_dims(scales, 1 - axis)
        quantized = add_initializer(graph, f"{name}.quantized", self._round(scaled))
        parameters = [
            add_initializer(graph, f"{name}.scale", scales),
            *self._zero_point(graph, f"{name}.zero_point", scales.shape),
        ]
        dequantize = _dequantizer(name, quantized, parameters, weight, axis=axis)
        graph.insert_before(product, dequantize)
        return dequantize.outputs[0]

    def _scale(self, magnitudes: np.ndarray | np.float32) -> np.ndarray:
        """Scales that map magnitudes to the largest number of the element type; one where a magnitude is zero."""
        scales = np.asarray(magnitudes, np.float32) / np.float32(LARGEST[self.element_type])
        return np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1))

    def _round(self, scaled: np.ndarray) -> np.ndarray:
        """The nearest numbers of the element type, to even where two are as near."""
        largest = LARGEST[self.element_type]
        clipped = scaled.clip(-largest, largest)
        return clipped.astype(ml_dtypes.float8_e4m3fn) if self.element_type == FP8 else np.rint(clipped).astype(np.int8)

    def _zero_point(self, graph: ir.Graph, name: str, shape: tuple[int, ...]) -> list[ir.Value]:
        """Case 3: zero points of a shape in int8, none in fp8."""
        return [] if self.element_type == FP8 else [add_initializer(graph, name, np.zeros(shape, np.int8))]


def _dequantizer(
    name: str, quantized: ir.Value, parameters: list[ir.Value], source: ir.Value, **attributes: int
) -> ir.Node:
    """The `DequantizeLinear` of a tensor that replaces `source` for its quantized readers."""
    node = ir.node("DequantizeLinear", [quantized, *parameters], attributes, name=f"{name}.dequantize")
    output = node.outputs[0]
    output.name, output.type, output.shape = f"{name}.dequantized", ir.TensorType(ir.DataType.FLOAT), source.shape
    return node
