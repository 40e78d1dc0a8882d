"""Latency bounds and throughput, measured by the scenarios of MLCommons LoadGen: SingleStream, Server and Offline."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.config.check import Scenario
from compressor.errors import TargetMissingError
from compressor.latency.loadgen_workers import LateError, query_workers
from compressor.latency.verdict import ScenarioResult

PERCENTILE = 0.99
MIN_QUERIES = 662
"""Queries that LoadGen needs to bound a 99th percentile with 99% confidence; with so few, the slowest one decides."""
MORE_QUERIES = 4 * MIN_QUERIES
"""Queries of the second run, where the first run kept the bound without proving it."""
_PATIENCE = 10
"""A scenario sends queries for at most this many times its expected duration, and waits as long for their responses."""


@dataclass(frozen=True)
class ScenarioSettings:
    """How a scenario is run.

    Attributes:
        batch: rows per call.
        p50: approximate milliseconds of a call.
        bound: maximum of the 99th percentile in milliseconds; None: it is measured, not bounded.
        rate: queries per second (Server).
        seconds: minimum duration.
        concurrency: maximum number of queries at the same time (Server, Offline).
        min_queries: minimum number of queries (SingleStream, Server).
    """

    batch: int
    p50: float
    bound: float | None
    rate: float
    seconds: float
    concurrency: int
    min_queries: int = MIN_QUERIES


def run_scenario(
    scenario: Scenario,
    calls: Sequence[Callable[[], object]],
    settings: ScenarioSettings,
    on_error: Callable[[BaseException], object] = lambda error: None,
) -> ScenarioResult:
    """Run one scenario to its end: LoadGen cannot be stopped (see `compressor.latency.loadgen_process`).

    - SingleStream: one query after the other; the bound is on LoadGen's estimate of the 99th percentile, which is
      above the true one with 99% confidence.
    - Server: queries arrive at random (Poisson) at `rate`; the bound has to hold for 99% of them, with 99% confidence.
    - Offline: all queries at once; throughput.

    Args:
        scenario: the scenario.
        calls: the queries, in turn; each makes one call.
        settings: sizes and bounds.
        on_error: receives the first exception of a call, at once and in the thread of that call.

    Raises:
        TargetMissingError: LoadGen is not installed.
        Exception: the first exception of a call.
    """
    loadgen = library()
    expected = _expected_milliseconds(scenario, settings)
    limit = _PATIENCE * max(1e3 * settings.seconds, expected)
    errors = list[BaseException]()
    workers = query_workers(loadgen, calls, settings.concurrency, 2e-3 * limit, errors, on_error)
    with tempfile.TemporaryDirectory() as folder, workers as issue:
        output = loadgen.LogOutputSettings()
        output.outdir, output.copy_summary_to_stdout = folder, False
        log = loadgen.LogSettings()
        log.log_output, log.enable_trace = output, False
        system = loadgen.ConstructSUT(issue, lambda: None)
        samples = loadgen.ConstructQSL(len(calls), len(calls), _load_samples, _load_samples)
        try:
            loadgen.StartTestWithLogSettings(system, samples, _test_settings(loadgen, scenario, settings, limit), log)
        finally:
            loadgen.DestroyQSL(samples)
            loadgen.DestroySUT(system)
        if not errors:
            return _read_result(scenario, settings, _read_log(Path(folder) / "mlperf_log_detail.txt"))
    if isinstance(errors[0], LateError):
        return ScenarioResult(
            scenario=scenario,
            queries=0,
            rate=settings.rate if scenario == "Server" else None,
            bound=settings.bound,
            holds=False,
            why=f"not finished within {2e-3 * limit:.0f} s; more queries arrive than are answered",
        )
    raise errors[0]


def run_until_proven(
    scenario: Scenario,
    calls: Sequence[Callable[[], object]],
    settings: ScenarioSettings,
    on_error: Callable[[BaseException], object] = lambda error: None,
) -> ScenarioResult:
    """Run a scenario, and once more with more queries if the first run keeps the bound without proving it.

    Args:
        scenario: the scenario.
        calls: the queries, in turn; each makes one call.
        settings: sizes and bounds of the first run.
        on_error: receives the first exception of a call, at once and in the thread of that call.

    Raises:
        TargetMissingError: LoadGen is not installed.
        Exception: the first exception of a call.
    """
    result = run_scenario(scenario, calls, settings, on_error)
    if result.unproven:
        result = run_scenario(scenario, calls, replace(settings, min_queries=MORE_QUERIES), on_error)
    return result


def library() -> Any:
    """LoadGen's module.

    Raises:
        TargetMissingError: it is not installed.
    """
    try:
        import mlperf_loadgen
    except ImportError as error:
        text = "MLCommons LoadGen is not installed"
        raise TargetMissingError.of_package("mlcommons-loadgen", "serving", text) from error
    return mlperf_loadgen


def _load_samples(samples: object) -> None:
    """Nothing to do: the samples are in memory."""


def _min_queries(scenario: Scenario, settings: ScenarioSettings) -> int:
    return 1 if scenario == "Offline" else settings.min_queries


def _expected_milliseconds(scenario: Scenario, settings: ScenarioSettings) -> float:
    """How long the minimum number of queries should take."""
    expected = _min_queries(scenario, settings) * settings.p50
    return max(expected, 1e3 * settings.min_queries / settings.rate) if scenario == "Server" else expected


def _test_settings(loadgen: Any, scenario: Scenario, settings: ScenarioSettings, limit: float) -> Any:
    """LoadGen's settings; `limit` is the maximum duration in milliseconds."""
    test = loadgen.TestSettings()
    test.mode = loadgen.TestMode.PerformanceOnly
    test.scenario = getattr(loadgen.TestScenario, scenario)
    test.min_query_count = _min_queries(scenario, settings)
    test.min_duration_ms = int(1e3 * settings.seconds)
    test.max_duration_ms = int(limit)
    if scenario == "SingleStream":
        test.single_stream_expected_latency_ns = max(1, int(1e6 * settings.p50))
        test.single_stream_target_latency_percentile = PERCENTILE
    elif scenario == "Server":
        bound = settings.bound if settings.bound is not None else 1e3 * settings.seconds
        test.server_target_qps = settings.rate
        test.server_target_latency_ns = int(1e6 * bound)
        test.server_target_latency_percentile = PERCENTILE
    else:
        test.offline_expected_qps = 1e3 / settings.p50
    return test


def _read_log(path: Path) -> dict[str, Any]:
    """LoadGen's results: key -> last value."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    entries = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith(":::MLLOG ")]
    return {entry["key"]: entry["value"] for entry in entries}


def _read_result(scenario: Scenario, settings: ScenarioSettings, log: Mapping[str, Any]) -> ScenarioResult:
    if scenario == "Offline":
        throughput = settings.batch * float(log["result_samples_per_second"])
        count = int(log.get("effective_samples_per_query", 0) or log["generated_samples_per_query"])
        return ScenarioResult(scenario=scenario, queries=count, samples_per_second=throughput)
    observed = 1e-6 * float(log[f"result_{100 * PERCENTILE:.2f}_percentile_latency_ns"])
    estimate = 1e-6 * float(log.get("early_stopping_latency_ss") or 0) or observed
    why = _missed_bound(scenario, settings.bound, observed, estimate, log)
    return ScenarioResult(
        scenario=scenario,
        queries=int(log["result_query_count"]),
        rate=settings.rate if scenario == "Server" else None,
        percentile=PERCENTILE,
        observed=observed,
        milliseconds=estimate,
        bound=settings.bound,
        holds=not why,
        why=why,
    )


def _missed_bound(
    scenario: Scenario, bound: float | None, observed: float, estimate: float, log: Mapping[str, Any]
) -> str:
    """The reason why a bound does not hold or is not proven; empty where it is proven.

    Args:
        scenario: the scenario.
        bound: maximum of the 99th percentile in milliseconds, or None.
        observed: 99th percentile of the queries, in milliseconds.
        estimate: LoadGen's upper bound of the true percentile, in milliseconds.
        log: LoadGen's results by key.
    """
    queries = int(log["result_query_count"])
    if bound is None:
        return ""
    if queries < MIN_QUERIES:
        return f"{queries} queries are too few to bound a 99th percentile"
    if observed > bound:
        over = int(log.get("result_overlatency_query_count", 0))
        slower = f", {over} of {queries} queries took longer" if over else ""
        return f"p99 {observed:.3f} ms is beyond the bound of {bound:g} ms{slower}"
    if estimate > bound or (scenario == "Server" and log["result_validity"] != "VALID"):
        largest = f": it may be {estimate:.3f} ms" if estimate > bound else ""
        return (
            f"p99 {observed:.3f} ms is within the bound of {bound:g} ms, which {queries} queries do not prove{largest}"
        )
    return ""
