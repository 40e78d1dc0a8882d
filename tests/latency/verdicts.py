"""Verdicts for tests: passed ones, with any field replaced."""

from __future__ import annotations

from typing import Any

from compressor.latency.verdict import OutputAgreement, ScenarioResult, Slowdown, Verdict


def slowdown(**fields: Any) -> Slowdown:
    """A slowdown of zero, within one percent."""
    equal = dict.fromkeys(("baseline_p50", "model_p50", "baseline_p99", "model_p99"), 1.0)
    interval = {"slowdown": 0.0, "low": -0.01, "high": 0.01, "confidence": 0.95, "limit": 0.05}
    return Slowdown(**{**equal, **interval, "rounds": 10, "calls": 20, "interleaved": True, **fields})


def scenario(**fields: Any) -> ScenarioResult:
    """A SingleStream scenario within its bound."""
    passed = {"scenario": "SingleStream", "queries": 662, "percentile": 0.99, "observed": 9.0, "bound": 10.0}
    return ScenarioResult(**{**passed, **fields})


def verdict(**fields: Any) -> Verdict:
    """A check that passed."""
    passed: dict[str, Any] = {
        "time": "2026-01-02T03:04:05+00:00",
        "model": "small",
        "baseline": "dense",
        "host": "onnxruntime 1.31.0 on CPUExecutionProvider, 2 threads",
        "inputs": "random",
        "batch": 1,
        "seq": 128,
        "outputs": OutputAgreement(expected="the baseline", error=1e-6, tolerance=1e-4, batches=16),
        "slowdown": slowdown(),
        "machine": {"processor": "AMD EPYC"},
        "seconds": 20.0,
    }
    return Verdict(**{**passed, **fields})
