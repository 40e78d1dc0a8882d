"""The symmetric quantized graph, in int8 or fp8, which TensorRT builds strongly typed engines from.

Quantizers are placed by the rules of `graph_passes.quantizers.placement`; every zero point is zero. In int8 the range
of an activation is the one of least mean squared error on the calibration rows. In fp8 it is the largest magnitude,
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
from compressor.quantization.portable import QuantizedGraph, float_model, inputs_of, without_padding
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
_CANDIDATES = 64
"""Number of ranges among which the one of least error is chosen."""
_SMALLEST_SHARE = 0.25
"""Smallest range to consider, as a share of the largest magnitude."""


def quantize_symmetric(
    graph: Path,
    rows: Sequence[Feeds],
    out: Path,
    *,
    precision: Precision = "int8",
    on_progress: ProgressCallback | None = None,
) -> QuantizedGraph:
    """Quantize a float graph symmetrically and write it.

    Args:
        graph: the graph; its file stays unchanged.
        rows: calibration rows, one batch each, from which the ranges of activations are measured.
        out: the file to write.
        precision: `int8`, or `fp8`, whose graph is of operator set 21 at least.
        on_progress: called with (rows done, rows).

    Raises:
        InputError: the graph is quantized already, it has no product to quantize, there are no rows, or one lacks an
            input.
    """
    model = float_model(graph)
    feeds = inputs_of(model, rows, graph)
    element_type = FP8 if precision == "fp8" else ir.DataType.INT8
    if precision == "fp8" and model.opset_imports.get("", 0) < FP8_OPSET:
        version_converter.convert_version(model, FP8_OPSET)
        model.ir_version = max(model.ir_version, _FP8_IR_VERSION)
    tensors = {str(entry.value.name) for entry in quantized_inputs(model) if entry.role is not QuantizedRole.WEIGHT}
    if not tensors:
        raise InputError(
            f"{graph}: no product can be quantized; use --precision fp16",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=graph,
        )
    histograms = measure_magnitudes(model, tensors, feeds, on_progress)
    levels = int(LARGEST[ir.DataType.INT8])
    ranges = {
        name: histogram.maximum if precision == "fp8" else histogram.clipping_range(levels)
        for name, histogram in histograms.items()
    }
    InsertQuantizers(ranges, element_type)(model)
    return QuantizedGraph.saved(model, out, len(rows))


class MagnitudeHistogram:
    """Counts of the magnitudes of a tensor in bins of equal width; it takes arrays of any shape, one after another.

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
            levels: number of steps from zero to the end of the range.
        """
        centers = (np.arange(_BINS) + 0.5) * self.width
        candidates = self.maximum * np.linspace(_SMALLEST_SHARE, 1, _CANDIDATES)
        errors = []
        for candidate in candidates:
            step = max(candidate / levels, np.finfo(np.float64).tiny)
            rounded = np.minimum(np.rint(centers / step), levels) * step
            errors.append(float(self.counts @ np.square(centers - rounded)))
        return float(candidates[_CANDIDATES - 1 - int(np.argmin(errors[::-1]))])


def measure_magnitudes(
    model: ir.Model, tensors: Collection[str], rows: Sequence[Feeds], on_progress: ProgressCallback | None = None
) -> dict[str, MagnitudeHistogram]:
    """A histogram of each tensor over the positions of the rows that are not padding.

    ONNX Runtime computes the tensors as outputs of the graph, one row after another, so that no more than those of one
    row are in memory.

    Args:
        model: the graph, which stays unchanged.
        tensors: names of activations.
        rows: batches of inputs.
        on_progress: called with (batches done, batches).
    """
    histograms = {name: MagnitudeHistogram() for name in tensors}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "activations.onnx"
        save(_with_outputs(model, tensors), path)
        run = ort_session.unoptimized_runner(path)
        for number, feeds in enumerate(rows):
            for row in without_padding(feeds):
                outputs = {**row, **run(row)}
                for name, histogram in histograms.items():
                    histogram.add(outputs[name])
            if on_progress is not None:
                on_progress(number + 1, len(rows))
    return histograms


def _with_outputs(model: ir.Model, tensors: Collection[str]) -> ir.Model:
    """A copy of a graph with the tensors as outputs too."""
    copy = model.clone()
    values = [output for node in copy.graph for output in node.outputs if output.name in tensors]
    copy.graph.outputs.extend(value for value in values if not value.is_graph_output())
    for value in copy.graph.outputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    return copy
