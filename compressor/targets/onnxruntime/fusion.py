"""Rewrite a graph with ONNX Runtime's fused operators. The result is used only if it computes the same function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.silence_libraries import quiet_tools
from compressor.targets.base import TOLERANCE, Feeds
from compressor.targets.onnxruntime.ort_session import error_line, open_session, run_session
from compressor.targets.random_inputs import fixed_batch
from compressor.targets.relative_error import ReferenceOutputs
from compressor.targets.trial_inputs import draws_ids, trial_feeds
from graph_passes import load, save
from graph_passes.passes import FuseForOrt

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Rewrite = Callable[[ir.Model], ir.Model]
_TRIALS = ((1, 6, False), (2, 9, True), (3, 5, True))
"""Batch, length and padding of the inputs that a fused graph is compared on."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fusion:
    """The outcome of `fuse`.

    Attributes:
        fused: whether the graph was written fused; otherwise it was written unchanged.
        error: largest relative error of the fused graph; None where it could not be built or run.
        reason: why the graph was not fused; empty where it was.
    """

    fused: bool
    error: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.fused:
            return f"fused by onnxscript's rules, equal to the original graph within {self.error:.1e}"
        return f"not fused beyond ONNX Runtime's own optimizations: {self.reason}"


def rewrite_for_ort(model: ir.Model) -> ir.Model:
    """Fuse a model by `FuseForOrt`; the model is changed."""
    return FuseForOrt()(model).model


def fuse(source: Path, out: Path, settings: Mapping[str, Any], rewrite: Rewrite = rewrite_for_ort) -> Fusion:
    """Fuse a graph and write it; it is written unchanged unless the fused graph computes the same function.

    Args:
        source: the graph.
        out: the file to write.
        settings: settings of the session, from `session_settings`.
        rewrite: fuses a model; it may raise any exception.

    Raises:
        CompressorError: the original graph cannot be loaded or run.
        OSError: `out` cannot be written.
    """
    plain = open_session(source, {**settings, "graph_optimization": "none"})
    trials, expected = _expected_outputs(plain, source)
    del plain
    error = None
    try:
        with quiet_tools():
            model = rewrite(load(source))
        save(model, out)
        error = _largest_error(out, settings, trials, expected)
        if error <= TOLERANCE["fp32"]:
            _log.debug("%s: fused within %.1e", source, error)
            return Fusion(fused=True, error=error)
        reason = f"the outputs of the fused graph differ by {error:.1e}"
    except CompressorError as failure:
        reason = error_line(failure.__cause__ or failure)
    except OSError:
        raise
    except Exception as failure:  # rewriters raise any exception on graphs that they do not expect
        reason = f"{type(failure).__name__}: {error_line(failure)}"
    save(load(source), out)
    _log.debug("%s: not fused: %s", source, reason)
    return Fusion(fused=False, error=error, reason=reason)


def fusion_trials(source: Path) -> Iterator[dict[str, np.ndarray]]:
    """Inputs of several sizes, with and without padding. A batch size that the graph fixes is kept."""
    model = load(source)
    fixed = fixed_batch(model)
    for seed, (batch, seq, padded) in enumerate(_TRIALS):
        yield trial_feeds(model, fixed or batch, seq, seed=seed, padded=padded)


def _expected_outputs(session: InferenceSession, source: Path) -> tuple[list[Feeds], list[dict[str, np.ndarray]]]:
    """The inputs that a graph can run on, and its outputs. The longest inputs may exceed its positions."""
    runs, failure = [], None
    for feeds in fusion_trials(source):
        try:
            runs.append((feeds, run_session(session, feeds)))
        except InputError as error:
            failure = error
    if failure is not None and not runs:
        raise _refused_inputs(source, failure) if draws_ids(load(source)) else failure
    return [feeds for feeds, _ in runs], [outputs for _, outputs in runs]


def _refused_inputs(graph: Path, error: InputError) -> InputError:
    """The error of a graph that does not run on random inputs, without rows of its model to try instead."""
    return InputError(
        f"{graph}: the graph does not run on random inputs ({error}), and carries no rows of its model; export it again"
        " with compress, or store rows in it (compressor.targets.example_rows)",
        code=ErrorCode.RUNTIME_FAILED,
        path=graph,
    )


def _largest_error(
    path: Path, settings: Mapping[str, Any], trials: list[Feeds], expected: list[dict[str, np.ndarray]]
) -> float:
    session, reference = open_session(path, settings), ReferenceOutputs(expected, trials)
    return max(
        reference.error(number, name, outputs[name])
        for number, feeds in enumerate(trials)
        for outputs in [run_session(session, feeds)]
        for name in expected[number]
    )
