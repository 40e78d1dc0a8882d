"""Rewrite a graph into ONNX Runtime's fused operators, and believe it only when it computes the same numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from compressor.errors import CompressorError, InputError
from compressor.silence_libraries import quiet_tools
from compressor.targets.base import TOLERANCE, Feeds
from compressor.targets.onnxruntime.ort_session import one_line, open_session, run
from compressor.targets.random_inputs import fixed_batch, random_feeds
from compressor.targets.relative_error import relative_error
from graph_passes import load, save
from graph_passes.passes.prefusion import drop_idle_expands, prepare

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

_TRIALS = ((1, 6, False), (2, 9, True), (3, 5, True))
"""Batch, length, padded: what a fused graph is tried on."""


def fuse(source: Path, out: Path, session: Mapping[str, Any]) -> str:
    """Write the graph as `out`, fused where that loads and computes the same function.

    Returns:
        What was done, in one line; why not, where nothing was.

    Raises:
        CompressorError: the graph as given cannot be loaded or run.
        OSError: `out` cannot be written.
    """
    plain = open_session(source, {**session, "graph_optimization": "none"})
    trials, expected = _runnable(plain, trial_feeds(source))
    del plain
    model = load(source)
    try:
        with quiet_tools():
            model = _rewritten(model)
        save(model, out)
        error = _largest_error(out, session, trials, expected)
        if error <= TOLERANCE["fp32"]:
            return f"fused by onnxscript's rules, equal to the graph given within {error:.1e}"
        why = f"the fused graph's outputs differ by {error:.1e}"
    except CompressorError as fault:
        why = one_line(fault.__cause__ or fault)
    except OSError:
        raise
    except Exception as fault:  # rewriters raise anything on graphs that they do not expect
        why = f"{type(fault).__name__}: {one_line(fault)}"
    save(load(source), out)
    return f"not fused beyond ONNX Runtime's own optimizations, for {why}"


def trial_feeds(source: Path) -> Iterator[dict[str, np.ndarray]]:
    """Random inputs of several sizes, padded ones among them, as many as the graph's fixed axes allow."""
    model = load(source)
    fixed = fixed_batch(model)
    for seed, (batch, seq, padded) in enumerate(_TRIALS):
        yield random_feeds(model, fixed or batch, seq, seed=seed, padded=padded)


def _runnable(session: InferenceSession, trials: Iterable[Feeds]) -> tuple[list[Feeds], list[dict[str, np.ndarray]]]:
    """The inputs that the graph can run on, and its outputs; a graph may have fewer positions than the longest asks."""
    found, refusal = [], None
    for feeds in trials:
        try:
            found.append((feeds, run(session, feeds)))
        except InputError as error:
            refusal = error
    if refusal is not None and not found:
        raise refusal
    return [feeds for feeds, _ in found], [outputs for _, outputs in found]


def _rewritten(model: ir.Model) -> ir.Model:
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    prepare(model)
    # Bodies are held back: the optimizer would inline them, and the rules find attention inside that is none of theirs.
    functions, imports = dict(model.functions), dict(model.opset_imports)
    model.functions.clear()
    fused = optimize_for_ort(model)[0]
    drop_idle_expands(fused)
    fused.functions.update(functions)
    fused.opset_imports.update({domain: imports[domain] for domain, _, _ in functions})
    return fused


def _largest_error(
    path: Path, session: Mapping[str, Any], trials: list[Feeds], expected: list[dict[str, np.ndarray]]
) -> float:
    fused = open_session(path, dict(session))
    return max(
        relative_error(wanted[name], got[name], feeds)
        for feeds, wanted in zip(trials, expected, strict=True)
        for got in [run(fused, feeds)]
        for name in wanted
    )
