"""Quantized products that are ruined by outliers: the range of their activations leaves too few steps for the rest."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compressor.quantization.portable import QuantizedGraph, quantize_graph
from compressor.quantization.products import PREFIX, activations_graph, products_graph
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime import ort_session
from compressor.targets.quantized_graph import quantized_products
from graph_passes import load, save
from graph_passes.passes import ReturnToFloats

_EXAMINED_ROWS = 8
"""Calibration rows on which products are examined; each has many positions."""
_RUINED = 0.5
"""Relative error of half of the positions above which a product is ruined; it is a few hundredths otherwise."""


def quantize_without_ruined(
    graph: Path, rows: Sequence[Feeds], out: Path, *, reduce_range: bool = False
) -> QuantizedGraph:
    """Quantize a float graph, and once more without the products that outliers ruin, where there are any.

    Args:
        graph: the graph; its file stays unchanged.
        rows: calibration rows, one batch each; products are examined on the first ones.
        out: the file to write.
        reduce_range: whether weights use 7 of 8 bits, see `quantize_graph`.

    Raises:
        TargetMissingError: NNCF is not installed.
        InputError: NNCF cannot quantize the graph, or there are no rows; see `quantize_graph`.
    """
    quantized = quantize_graph(graph, rows, out, reduce_range=reduce_range)
    ruined = ruined_products(quantized.path, rows[:_EXAMINED_ROWS])
    if not ruined:
        return quantized
    # Their weights were smoothed and rounded for int8, so that they do not merely drop their quantizers.
    quantized = quantize_graph(graph, rows, out, keep_float=ruined, reduce_range=reduce_range)
    left = tuple(name for name in quantized.in_float if name not in ruined)
    return dataclasses.replace(quantized, in_float=left, ruined=ruined)


def ruined_products(quantized: Path, rows: Sequence[Feeds]) -> tuple[str, ...]:
    """Names of the quantized products whose outputs, at half of the positions or more, have little left of the values.

    Each product is computed from the same activations, with these in int8 and in floats. An outlier dominates the norm
    of a whole tensor, so that errors are relative to each position.

    Args:
        quantized: the portable quantized graph.
        rows: batches of inputs.
    """
    ruined: list[str] = []
    # A ruined product passes on little of its outliers, so that later ones show only when it is in floats.
    while further := _ruined(ReturnToFloats(ruined)(load(quantized)).model, rows):
        ruined += further
    return tuple(ruined)


def _ruined(model: ir.Model, rows: Sequence[Feeds]) -> list[str]:
    """Names of the ruined products of a graph, computed from the activations that they have in it."""
    names = {f"{PREFIX}{node.outputs[0].name}": node.name or "" for node in quantized_products(model)}
    if not names:
        return []
    errors: dict[str, list[np.ndarray]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.onnx" for name in ("int8", "float", "activations")]
        save(products_graph(model), paths[0])
        save(ReturnToFloats(names.values())(products_graph(model)).model, paths[1])
        save(activations_graph(model), paths[2])
        run_int8, run_float, run = map(ort_session.unoptimized_runner, paths)
        for feeds in rows:
            operands = {**feeds, **run(feeds)}
            expected = run_float(operands)
            for name, output in run_int8(operands).items():
                errors[name].append(_position_errors(expected[name], output))
    ruined = [name for name, parts in errors.items() if np.median(np.concatenate(parts)) > _RUINED]
    return [names[output] for output in ruined]


def _position_errors(expected: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Norm of the difference over the norm of the expected values, over the last axis."""
    difference, norm = (np.linalg.norm(array, axis=-1).ravel() for array in (output - expected, expected))
    return np.where(norm > 0, difference / np.maximum(norm, np.finfo(np.float32).tiny), 0.0)
