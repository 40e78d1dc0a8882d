"""Choose the form of normalizations that ONNX Runtime computes fastest on this machine, by timing."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import InputError
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime.ort_session import open_session, run_session
from compressor.targets.relative_error import relative_error
from graph_passes import load, save
from graph_passes.passes import SplitSkipNorms

ROUNDS = 6
PAUSE_SECONDS = 0.05
"""Time in which the threads of the other session stop spinning."""
GAIN = 1.01
"""Ratio of times from which on a form is used that is not ONNX Runtime's own."""
_log = logging.getLogger(__name__)


def choose_norms(
    path: Path, settings: Mapping[str, Any], feeds: Feeds, tolerance: float, seconds: float = 1.0
) -> str | None:
    """Split the fused normalizations of a graph where that is faster.

    Args:
        path: the graph, fused for ONNX Runtime; replaced where the other form is faster and computes the same.
        settings: settings of the session.
        feeds: one batch of inputs of the size to be fast at.
        tolerance: largest relative error of the other form.
        seconds: approximate time to spend.

    Returns:
        What was chosen, in a few words; None where the graph has no fused normalization of a residual sum, or cannot
        run at this size.
    """
    model = load(path)
    if not SplitSkipNorms()(model).modified:
        return None
    with tempfile.TemporaryDirectory() as folder:
        split = Path(folder) / path.name
        save(model, split)
        sessions = [open_session(file, settings) for file in (path, split)]
        try:
            expected, outputs = (run_session(session, feeds) for session in sessions)
        except InputError:  # the caller learns why when it runs the engine at this size
            return None
        error = max(relative_error(expected[name], outputs[name], feeds) for name in expected)
        times: tuple[list[float], list[float]] = ([], [])
        share = seconds / (2 * ROUNDS)
        for _ in range(ROUNDS):
            for session, samples in zip(sessions, times, strict=True):
                time.sleep(min(PAUSE_SECONDS, share / 2))
                run_session(session, feeds)
                end = time.perf_counter() + share / 2
                while not samples or time.perf_counter() < end:
                    start = time.perf_counter()
                    run_session(session, feeds)
                    samples.append(time.perf_counter() - start)
        gain = float(np.median(times[0]) / np.median(times[1]))
        del sessions
        _log.debug("%s: split norms are %.3f times as fast, relative error %.1e", path, gain, error)
        if error > tolerance:
            return f"fused norms kept, since split ones differ by {error:.1e}"
        if gain < GAIN:
            return f"fused norms kept, split ones are {gain:.2f} times as fast"
        save(load(split), path)
    return f"norms split, {gain:.2f} times as fast as fused ones"
