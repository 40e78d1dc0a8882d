"""The quantized products whose return to floats brings the outputs of a graph nearest to those of the float graph."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from compressor.progress import ProgressCallback
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime import ort_session
from compressor.targets.quantized_graph import quantized_products
from graph_passes import load, save
from graph_passes.passes import ReturnToFloats

Outputs = Sequence[dict[str, np.ndarray]]


def rank_products(
    quantized: Path, float_graph: Path, rows: Sequence[Feeds], on_progress: ProgressCallback | None = None
) -> list[str]:
    """Names of the quantized products, the one whose return to floats helps most first.

    Each product is returned to floats alone, and the mean squared difference of all outputs to those of the float graph
    is measured, relative to the mean square of the latter. No labels are needed.

    Args:
        quantized: the portable quantized graph.
        float_graph: the graph that it was made from.
        rows: batches of inputs.
        on_progress: called with (products tried, products).
    """
    names = [node.name or "" for node in quantized_products(load(quantized))]
    run = ort_session.unoptimized_runner(float_graph)
    expected = [run(feeds) for feeds in rows]
    distances = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            model = ReturnToFloats({name})(load(quantized)).model
            path = Path(folder) / "graph.onnx"
            save(model, path)
            run = ort_session.unoptimized_runner(path)
            distances[name] = _distance(expected, [run(feeds) for feeds in rows])
            if on_progress is not None:
                on_progress(number + 1, len(names))
    return sorted(names, key=lambda name: distances[name])


def output_distance(quantized: Path, float_graph: Path, rows: Sequence[Feeds]) -> float:
    """Mean squared difference between the outputs of two graphs, relative to the mean square of the float graph's.

    Args:
        quantized: the quantized graph.
        float_graph: the graph that it was made from.
        rows: batches of inputs.
    """
    runs = map(ort_session.unoptimized_runner, (float_graph, quantized))
    expected, outputs = ([run(feeds) for feeds in rows] for run in runs)
    return _distance(expected, outputs)


def _distance(expected: Outputs, outputs: Outputs) -> float:
    """Mean squared difference over the mean square of the expected outputs, summed over the outputs."""
    total = 0.0
    for name in expected[0]:
        differences = sum(float(np.square(a[name] - b[name]).sum()) for a, b in zip(expected, outputs, strict=True))
        scale = sum(float(np.square(a[name]).sum()) for a in expected)
        total += differences / max(scale, 1e-30)
    return total
