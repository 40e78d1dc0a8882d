"""Write a graph in the form that TensorRT reads, with the engine's precision as the types of the graph.

1. Local functions are inlined, because 8.6 reads none.
2. From 10 on: the scale of attention scores moves to the queries, where the fusion of attention expects it (TensorRT's
   documentation, "Fused Attention"). Quantized graphs stay as they are, because a MatMul fuses with the scales next to
   it.
3. For 8.6: operator set 18 is written as 17, `Shape` and `Slice` state their axes in inputs, and 64-bit inputs and
   outputs become 32-bit.
4. Quantized graphs have zero points of zero. For 8.6 their weights are written as floats with a `QuantizeLinear` behind
   them.
5. fp16 and bf16: weights and arithmetic are converted, inputs and outputs keep their types. The types of a quantized
   graph (`QuantizeLinear`, int8 or fp8) stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, ShapeInferencePass

from compressor.errors import ErrorCode, InputError
from compressor.targets.base import QUANTIZED, BuildOptions, Precision, Span
from compressor.targets.graph_facts import is_quantized
from compressor.targets.tensorrt.bindings import Features
from compressor.targets.tensorrt.metadata import Shape
from compressor.targets.trial_inputs import axis_kind, memory_length
from compressor.workdir import FP8_GRAPH, SYMMETRIC_GRAPH
from graph_passes import GraphError, load, save
from graph_passes.passes import (
    LowerOpset,
    MakeAxesExplicit,
    NarrowIntegers,
    QuantizeWeightsInside,
    ReducePrecision,
    ScaleQueries,
)
from graph_passes.passes.lower_opset import OPSET as OLDEST_OPSET
from graph_passes.quantizers.faults import QuantizerRule, form_faults

_DTYPES: Mapping[Precision, ir.DataType] = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class PreparedGraph:
    """The changes of a graph by `prepare`.

    Attributes:
        inlined: number of local functions that were inlined.
        scaled_queries: whether the scale of attention scores was moved to the queries.
        quantized: whether the graph has quantization nodes, so that its types stay as they are.
        precision: the precision that the graph was converted to; None: it was not converted.
        weights_inside: number of weights that the graph quantizes, because 8.6 reads none in int8.
        opset: the operator set that the graph was lowered to, with 32-bit inputs and outputs; None: it was not lowered.
    """

    inlined: int = 0
    scaled_queries: bool = False
    quantized: bool = False
    precision: Precision | None = None
    opset: int | None = None
    weights_inside: int = 0

    def __str__(self) -> str:
        changes = [
            f"{self.inlined} local functions inlined" if self.inlined else "",
            "queries scaled instead of scores" if self.scaled_queries else "",
            "quantized types kept" if self.quantized else "",
            f"{self.weights_inside} weights quantized in the graph" if self.weights_inside else "",
            f"converted to {self.precision}, inputs and outputs unchanged" if self.precision else "",
            f"written in operator set {self.opset} with 32-bit inputs" if self.opset else "",
        ]
        return "; ".join(filter(None, changes)) or "graph unchanged"


def prepare(source: Path, out: Path, precision: Precision, supported: Features) -> PreparedGraph:
    """Write a graph in the form that TensorRT reads.

    Raises:
        GraphError: the file cannot be read.
        InputError: the graph has an operator set or an operator that this TensorRT cannot read, or lacks the quantizers
            that the precision needs.
    """
    model = load(source)
    inlined = len(model.functions)
    if inlined:
        InlinePass()(model)
    quantized = is_quantized(model)
    _check_quantizers(model, source, precision)
    if not supported.int64:
        _lower_opset(model, source, supported.version)
    scaled = supported.int64 and not quantized and ScaleQueries()(model).modified
    converted = precision if precision in _DTYPES and not quantized else None
    if converted is not None:
        model = ReducePrecision(_DTYPES[converted])(model).model
    opset, weights_inside = None, 0
    if not supported.int64:
        opset, weights_inside = OLDEST_OPSET, len(QuantizeWeightsInside()(model).report)
        MakeAxesExplicit()(model)
        NarrowIntegers()(model)
    save(model, out)
    return PreparedGraph(inlined, scaled, quantized, converted, opset, weights_inside)


def _check_quantizers(model: ir.Model, source: Path, precision: Precision) -> None:
    """Raise InputError unless a graph has the quantizers that a precision needs, with zero points of zero."""
    if precision in QUANTIZED and not is_quantized(model):
        text = (
            f"{source}: has no quantized matmuls, and TensorRT runs in {precision} only matmuls that the graph"
            f" quantizes; use {SYMMETRIC_GRAPH} or {FP8_GRAPH} of a run with --target trt --precision {precision}"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=source)
    asymmetric = next((fault for fault in form_faults(model) if fault.rule is QuantizerRule.SYMMETRIC), None)
    if asymmetric is not None:
        text = (
            f"{source}: the zero point of {asymmetric.node} is not zero, which TensorRT cannot compute with; use the"
            f" graph of a run with --target trt --precision int8, {SYMMETRIC_GRAPH}"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=source, node=asymmetric.node)


def element_types(path: Path) -> dict[str, ir.DataType]:
    """Tensor name -> element type, for the computed tensors whose type shape inference determines."""
    model = load(path)
    ShapeInferencePass()(model)
    values = [output for node in model.graph.all_nodes() for output in node.outputs]
    return {str(value.name): value.dtype for value in values if value.dtype is not None}


def profile(model: ir.Model, options: BuildOptions) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Input name -> smallest, usual and largest shape; axes that the graph fixes keep their size.

    The first axis is the batch; other axes are the length, except those of memories and caches (`axis_kind`). Memories
    may have the maximum length that the model takes.

    Raises:
        InputError: the graph has key/value caches or memories, and their length is unknown.
    """
    longest = memory_length(model, 1) or 0
    smallest_memory, usual_memory, largest_memory = options.memory
    memory = smallest_memory, usual_memory or longest, max(largest_memory, longest)
    spans = {"batch": options.batch, "length": options.seq, "memory": memory, "past": options.memory}
    shapes = {}
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        axes = [_axis_span(value, axis, dim, spans) for axis, dim in enumerate(value.shape or ())]
        smallest, middle, largest = (tuple(span[index] for span in axes) for index in range(3))
        shapes[str(value.name)] = (smallest, middle, largest)
    return shapes


def _axis_span(value: ir.Value, axis: int, dim: int | ir.SymbolicDim, spans: Mapping[str, Span]) -> Span:
    if isinstance(dim, int):
        return dim, dim, dim
    kind = axis_kind(value, axis)
    if not spans[kind][-1]:
        text = (
            f"{value.name}: a {'key/value cache' if kind == 'past' else kind} whose maximum length is unknown; export"
            " the model without it, or use --target ort"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED, tensor=value.name, kind=kind)
    return spans[kind]


def _lower_opset(model: ir.Model, source: Path, version: str) -> None:
    """Write a graph of operator set 18 in set 17; raises InputError if an operator has no equivalent there."""
    try:
        LowerOpset()(model)
    except GraphError as error:
        text = f"{source}: {error}; TensorRT {version} reads up to operator set {OLDEST_OPSET}, TensorRT 10 newer ones"
        raise InputError(text, code=ErrorCode.UNSUPPORTED, path=source, **error.details) from error
