"""Weights and arithmetic in half precision, for runtimes on a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
import onnx_ir as ir

from graph_passes import save


def halve(path: Path) -> None:
    """Convert a graph in place; inputs and outputs keep their types.

    Numbers beyond half precision's range, such as a mask's lowest value, become the nearest that it has.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of every number that it clips
        # Its own shape inference fails on what it does not know; the graph's shapes are inferred already.
        half = convert_float_to_float16(
            onnx.load(path), keep_io_types=True, disable_shape_infer=True, max_finite_val=65504.0
        )
    save(ir.from_proto(half), path)
