"""The symmetric quantized graph, in int8 or fp8, which TensorRT builds strongly typed engines from.

Quantizers are placed by the rules of `graph_passes.quantizers.placement`; every zero point is zero. In int8 the range
of an activation is the one of least mean squared error on the calibration rows. In fp8 it is the largest magnitude,
since the error of a floating-point number is relative.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from onnxscript import version_converter

from compressor.errors import ErrorCode, InputError
from compressor.progress import ProgressCallback
from compressor.quantization.calibration_inputs import float_model, inputs_of
from compressor.quantization.portable import QuantizedGraph
from compressor.quantization.ranges import measure_magnitudes
from compressor.targets.base import Feeds, Precision
from compressor.targets.quantized_graph import float_products, quantized_products
from graph_passes import save
from graph_passes.passes.insert_quantizers import LARGEST, InsertQuantizers
from graph_passes.quantizers.faults import FP8, FP8_OPSET
from graph_passes.quantizers.placement import QuantizedRole, quantized_inputs

logger = logging.getLogger(__name__)

_FP8_IR_VERSION = 10
"""First version of the file format with operator set 21."""


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
    save(model, out)
    products, in_float = (
        tuple(node.name or "" for node in nodes) for nodes in (quantized_products(model), float_products(model))
    )
    logger.debug("%s: %d products in %s, %d in floats", out, len(products), precision, len(in_float))
    return QuantizedGraph(out, products, in_float, len(rows))
