"""The symmetric quantized graph, in int8 or fp8, from which TensorRT builds strongly typed engines.

The rules of `graph_passes.quantizers.placement` determine where quantizers are; every zero point is zero. In int8 the
range of an activation has the least mean squared error on the calibration examples. In fp8 it is the largest magnitude,
since the error of a floating-point number is relative.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnxscript import version_converter

from compressor.errors import ErrorCode, InputError
from compressor.progress import ProgressCallback
from compressor.quantization.portable import QuantizedGraph, float_model, inputs_of
from compressor.targets.base import Feeds, Precision
from compressor.targets.onnxruntime import ort_session
from graph_passes import save
from graph_passes.passes.insert_quantizers import LARGEST, InsertQuantizers
from graph_passes.quantizers.faults import FP8, FP8_OPSET
from graph_passes.quantizers.placement import QuantizedRole, quantized_inputs

_FP8_IR_VERSION = 10
"""First version of the file format with operator set 21."""
_BINS = 2048
"""Bins of a histogram; at least half of them are below the largest magnitude."""
_RANGES = 64
"""Number of ranges from which the range of least error is chosen."""
_SMALLEST_SHARE = 0.25
"""Smallest of these ranges, as a share of the largest magnitude."""


def quantize_symmetric(
    graph: Path,
    examples: Sequence[Feeds],
    out: Path,
    *,
    precision: Precision = "int8",
    on_progress: ProgressCallback | None = None,
) -> QuantizedGraph:
    """Quantize a float graph symmetrically and write it.

    Args:
        graph: the graph; its file stays unchanged.
        examples: batches of calibration examples, on which the ranges of activations are measured.
        precision: `int8`, or `fp8`, whose graph has at least operator set 21.
        on_progress: called with (batches done, batches).

    Raises:
        InputError: the graph is quantized already, it has no matmul to quantize, there are no examples, or a batch
            lacks an input.
    """
    model = float_model(graph)
    feeds = inputs_of(model, examples, graph)
    element_type = FP8 if precision == "fp8" else ir.DataType.INT8
    if precision == "fp8" and model.opset_imports.get("", 0) < FP8_OPSET:
        version_converter.convert_version(model, FP8_OPSET)
        model.ir_version = max(model.ir_version, _FP8_IR_VERSION)
    tensors = {str(entry.value.name) for entry in quantized_inputs(model) if entry.role is not QuantizedRole.WEIGHT}
    if not tensors:
        raise InputError.of_file(graph, "no matmul can be quantized; use --precision fp16", ErrorCode.UNSUPPORTED_MODEL)
    histograms = measure_magnitudes(model, tensors, feeds, on_progress)
    levels = int(LARGEST[ir.DataType.INT8])
    ranges = {
        name: histogram.maximum if precision == "fp8" else histogram.clipping_range(levels)
        for name, histogram in histograms.items()
    }
    InsertQuantizers(ranges, element_type)(model)
    return QuantizedGraph.saved(model, out, len(examples))


class MagnitudeHistogram:
    """Counts of the magnitudes of a tensor in bins of equal width, over arrays of any shape.

    Attributes:
        maximum: the largest finite magnitude.
        counts: number of elements in each bin.
        width: width of a bin. It doubles when a magnitude is beyond the last bin.
    """

    def __init__(self) -> None:
        self.maximum = 0.0
        self.counts = np.zeros(_BINS)
        self.width = 0.0

    def add(self, array: np.ndarray) -> None:
        """Count the finite elements of an array."""
        magnitudes = np.abs(array[np.isfinite(array)]).astype(np.float64)
        largest = float(magnitudes.max(initial=0.0))
        if self.width == 0.0 and largest > 0:
            self.width = 2.0 ** np.ceil(np.log2(largest)) / _BINS
            self.counts[0] = self.counts.sum()  # zeros that came before
        while largest > self.width * _BINS:
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(axis=1), np.zeros(_BINS // 2)])
            self.width *= 2
        self.maximum = max(self.maximum, largest)
        bins = (magnitudes / self.width).astype(np.int64) if self.width else np.zeros(magnitudes.size, np.int64)
        self.counts += np.bincount(np.minimum(bins, _BINS - 1), minlength=_BINS)

    def clipping_range(self, levels: int) -> float:
        """The range whose uniform quantization has the least mean squared error.

        Args:
            levels: largest integer that a magnitude is rounded to.
        """
        centers = (np.arange(_BINS) + 0.5) * self.width
        ranges = self.maximum * np.linspace(_SMALLEST_SHARE, 1, _RANGES)[::-1]  # of equal errors, the largest range
        errors = []
        for scale in np.maximum(ranges / levels, np.finfo(np.float64).tiny):
            rounded = np.minimum(np.rint(centers / scale), levels) * scale
            errors.append(float(self.counts @ np.square(centers - rounded)))
        return float(ranges[np.argmin(errors)])


def without_padding(feeds: Feeds) -> list[Feeds]:
    """The examples of a batch one by one, without their padding, so that no range is measured on it.

    A mask `[batch, length]`, `attention_mask` or `decoder_attention_mask`, determines the padding of the integer inputs
    `[batch, length, ...]` of the encoder or of the decoder. Other inputs, and examples of padding only, stay unchanged.
    """
    masks = {name: array != 0 for name, array in feeds.items() if name.endswith("attention_mask") and array.ndim == 2}
    if all(mask.all() for mask in masks.values()):
        return [feeds]
    examples: list[Feeds] = []
    for number in range(len(next(iter(masks.values())))):
        example = {name: array[number : number + 1] for name, array in feeds.items()}
        for name, array in feeds.items():
            mask = masks.get(f"{'decoder_' if name.startswith('decoder_') else ''}attention_mask")
            if mask is None or array.shape[:2] != mask.shape or array.dtype.kind not in "biu":
                continue
            if mask[number].any():
                example[name] = example[name][:, mask[number]]
        examples.append(example)
    return examples


def measure_magnitudes(
    model: ir.Model, tensors: Collection[str], batches: Sequence[Feeds], on_progress: ProgressCallback | None = None
) -> dict[str, MagnitudeHistogram]:
    """A histogram of each tensor over the tokens that are not padding.

    ONNX Runtime computes the tensors as outputs of the graph, batch by batch, so that only those of one batch are in
    memory.

    Args:
        model: the graph, which stays unchanged.
        on_progress: called with (batches done, batches).
    """
    histograms = {name: MagnitudeHistogram() for name in tensors}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "activations.onnx"
        save(_with_outputs(model, tensors), path)
        run = ort_session.unoptimized_runner(path)
        for number, feeds in enumerate(batches):
            for example in without_padding(feeds):
                outputs = {**example, **run(example)}
                for name, histogram in histograms.items():
                    histogram.add(outputs[name])
            if on_progress is not None:
                on_progress(number + 1, len(batches))
    return histograms


def _with_outputs(model: ir.Model, tensors: Collection[str]) -> ir.Model:
    copy = model.clone()
    values = [output for node in copy.graph for output in node.outputs if output.name in tensors]
    copy.graph.outputs.extend(value for value in values if not value.is_graph_output())
    for value in copy.graph.outputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    return copy
