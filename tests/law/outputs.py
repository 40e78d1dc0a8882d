"""Outputs of graphs on ONNX Runtime, and the relative error between two of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

Feeds = Mapping[str, np.ndarray]


def run(path: Path, feeds: Sequence[Feeds], *, optimized: bool = True) -> list[list[np.ndarray]]:
    """The outputs of a graph for each of several inputs; inputs that the graph lacks are left out.

    Args:
        path: the graph.
        feeds: the inputs by name.
        optimized: whether the runtime optimizes the graph.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return [session.run(None, {name: value for name, value in feed.items() if name in names}) for feed in feeds]


def relative_error(reference: Sequence[Sequence[np.ndarray]], outputs: Sequence[Sequence[np.ndarray]]) -> float:
    """Largest difference over the largest magnitude of an output, over all outputs; NaN if one has a NaN."""
    pairs = zip(itertools.chain(*reference), itertools.chain(*outputs), strict=True)
    return float(np.max([np.abs(a - b).max() / np.abs(a).max() for a, b in pairs]))
