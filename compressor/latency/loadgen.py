"""Latency bounds and throughput, measured by the scenarios of MLCommons LoadGen: SingleStream, Server and Offline.

A scenario runs in a separate process, since LoadGen cannot be stopped: it keeps to its schedule even if queries fail.
The first error of a query is reported at once and ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compressor.config.check import CheckRequest, Scenario
from compressor.errors import CompressorError, ErrorCode, TargetMissingError
from compressor.latency.endpoints import encode_batches, open_endpoint
from compressor.latency.verdict import ScenarioResult, Slowdown
from compressor.silence_libraries import one_line
from compressor.targets.base import Feeds
from graph_passes.interrupts import interrupts_deferred

PERCENTILE = 0.99
MIN_QUERIES = 662
"""Queries that LoadGen needs to bound a 99th percentile with 99% confidence; the slowest of them decides."""
MORE_QUERIES = 4 * MIN_QUERIES
"""Queries of the second run, after a first run that kept the bound without proving it."""
_PATIENCE = 10
"""A scenario sends queries for at most this many times its expected duration, and waits as long for their responses."""
_WARM_UPS = 3
"""Calls before the scenario: the first calls of a process and of an engine take longer."""
_MIN_CONCURRENCY = 4
_WAITING_SHARE = 0.25
"""Share of its deadline that a call may wait for concurrent calls, unless these are fewer than `_MIN_CONCURRENCY`."""
_log = logging.getLogger(__name__)


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


def _run_worker(
    pipe: Connection, scratch: str, scenario: Scenario, request: CheckRequest, batches: Sequence[Feeds], times: Slowdown
) -> None:
    """Run a scenario in the process, with the arguments of `measure`, and send its result or the first error.

    The folder `scratch` outlives the process, which is killed and cannot remove temporary files.
    """
    tempfile.tempdir = scratch
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        with open_endpoint(request, request.model) as model:
            calls = [functools.partial(model.call, batch) for batch in encode_batches(model, batches)]
            for call in calls[:_WARM_UPS]:
                call()
            waiting = _WAITING_SHARE * 1e3 * request.deadline
            settings = ScenarioSettings(
                batch=request.batch,
                p50=times.model_p50,
                bound=None if scenario == "Offline" else request.p99,
                rate=request.rate or 500 / times.baseline_p50,
                seconds=request.load_seconds,
                concurrency=max(_MIN_CONCURRENCY, min(model.concurrency, int(waiting / times.model_p50))),
            )
            pipe.send(run_until_proven(scenario, calls, settings, functools.partial(_send_error, pipe)))
    except Exception as error:
        _send_error(pipe, error)


def measure(
    scenario: Scenario,
    request: CheckRequest,
    batches: Sequence[Feeds],
    times: Slowdown,
    worker: Callable[..., object] = _run_worker,
) -> ScenarioResult:
    """Run one scenario for the model of a check, which a new process loads or connects to.

    Without a `rate`, the Server scenario sends half as many queries per second as a single caller of the baseline can,
    so that a slow model receives as many queries as a fast model.

    Args:
        request: names the model and sets the bound.
        batches: the queries, in turn.

    Raises:
        CompressorError: the first error of a call, or the process ended without a result.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with receiver, tempfile.TemporaryDirectory() as scratch:
        process = context.Process(target=worker, args=(sender, scratch, scenario, request, batches, times), daemon=True)
        try:
            with _interrupts_deferred():
                process.start()
            sender.close()  # else the pipe would stay open when the process ends
            result = receiver.recv()
        except EOFError as error:
            process.join()
            raise CompressorError(
                f"LoadGen, {scenario}: its process ended without a result (exit code {process.exitcode}); check that"
                " there is memory to load the model once more",
                code=ErrorCode.PROCESS_ENDED,
                scenario=scenario,
                exit_code=process.exitcode,
            ) from error
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
    if isinstance(result, CompressorError):
        raise result
    assert isinstance(result, ScenarioResult)
    _log.debug("%s: %s", scenario, result)
    return result


def _send_error(pipe: Connection, error: BaseException) -> None:
    """Send an error to the parent. Errors of libraries are replaced, since some cannot be pickled."""
    if not isinstance(error, CompressorError):
        error = CompressorError(f"{type(error).__name__}: {one_line(error)}", code=ErrorCode.CHECK_INTERRUPTED)
    pipe.send(error)


def _exit_with_parent() -> None:
    """End the process when the parent has ended, since nothing else would end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let processes that start in the context ignore Ctrl-C, which a terminal sends to all: the parent ends them.

    An interrupt reaches the parent at the end of the context, since a new process reads its arguments from the parent.
    """
    resource_tracker.ensure_running()  # its start would unblock interrupts
    with interrupts_deferred():
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit a mask, but no handler
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_until_proven(
    scenario: Scenario,
    calls: Sequence[Callable[[], object]],
    settings: ScenarioSettings,
    on_error: Callable[[BaseException], object] = lambda error: None,
) -> ScenarioResult:
    """Run a scenario, and run it again with more queries if the first run keeps the bound without proving it."""
    result = run_scenario(scenario, calls, settings, on_error)
    if result.unproven:
        result = run_scenario(scenario, calls, replace(settings, min_queries=MORE_QUERIES), on_error)
    return result


def run_scenario(
    scenario: Scenario,
    calls: Sequence[Callable[[], object]],
    settings: ScenarioSettings,
    on_error: Callable[[BaseException], object] = lambda error: None,
) -> ScenarioResult:
    """Run one scenario to its end.

    - SingleStream: queries in sequence; the bound is on LoadGen's estimate of the 99th percentile, which is above the
      true percentile with 99% confidence.
    - Server: queries arrive at random (Poisson) at `rate`; the bound has to hold for 99% of them, with 99% confidence.
    - Offline: all queries at once; throughput.

    Args:
        calls: the queries, in turn; each makes one call.
        on_error: receives the first exception of a call at once, in the thread of that call.

    Raises:
        TargetMissingError: LoadGen is not installed.
        Exception: the first exception of a call.
    """
    loadgen = library()
    queries = 1 if scenario == "Offline" else settings.min_queries
    expected = queries * settings.p50
    if scenario == "Server":
        expected = max(expected, 1e3 * queries / settings.rate)
    limit = _PATIENCE * max(1e3 * settings.seconds, expected)
    errors = list[BaseException]()
    workers = _query_workers(loadgen, calls, settings.concurrency, 2e-3 * limit, errors, on_error)
    with tempfile.TemporaryDirectory() as folder, workers as issue:
        output = loadgen.LogOutputSettings()
        output.outdir, output.copy_summary_to_stdout = folder, False
        log = loadgen.LogSettings()
        log.log_output, log.enable_trace = output, False
        test = _test_settings(loadgen, scenario, settings, queries, limit)
        system = loadgen.ConstructSUT(issue, lambda: None)
        # The samples are in memory: there is nothing to load or unload.
        samples = loadgen.ConstructQSL(len(calls), len(calls), lambda samples: None, lambda samples: None)
        try:
            loadgen.StartTestWithLogSettings(system, samples, test, log)
        finally:
            loadgen.DestroyQSL(samples)
            loadgen.DestroySUT(system)
        if not errors:
            return _read_result(scenario, settings, _read_log(Path(folder) / "mlperf_log_detail.txt"))
    if isinstance(errors[0], _LateError):
        return ScenarioResult(
            scenario=scenario,
            queries=0,
            rate=settings.rate if scenario == "Server" else None,
            bound=settings.bound,
            holds=False,
            why=f"not finished within {2e-3 * limit:.0f} s; more queries arrive than are answered",
        )
    raise errors[0]


class _LateError(Exception):
    """The time limit of the scenario has passed."""


@contextlib.contextmanager
def _query_workers(
    loadgen: Any,
    calls: Sequence[Callable[[], object]],
    count: int,
    seconds: float,
    errors: list[BaseException],
    on_error: Callable[[BaseException], object],
) -> Iterator[Callable[[Sequence[Any]], None]]:
    """Start `count` threads that answer queries, and yield the function that issues LoadGen's samples to them.

    The index of a sample selects its call. After the first error or the time limit, queries are completed without a
    call, because LoadGen waits for all queries that it has issued. `errors` receives the exceptions of calls, and
    _LateError after the time limit.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end = time.monotonic() + seconds

    def work() -> None:
        while (sample := waiting.get()) is not None:
            if not errors and time.monotonic() > end:
                errors.append(_LateError())
            if not errors:
                try:
                    calls[sample.index]()
                except BaseException as error:
                    errors.append(error)
                    if error is errors[0]:  # calls in other threads may fail at the same moment
                        on_error(error)
            loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(sample.id, 0, 0)])

    def issue(samples: Sequence[Any]) -> None:
        for sample in samples:
            waiting.put(sample)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield issue
    finally:
        issue([None] * len(threads))
        for thread in threads:
            thread.join()


def _test_settings(loadgen: Any, scenario: Scenario, settings: ScenarioSettings, queries: int, limit: float) -> Any:
    """LoadGen's settings; `limit` is the maximum duration in milliseconds."""
    test = loadgen.TestSettings()
    test.mode = loadgen.TestMode.PerformanceOnly
    test.scenario = getattr(loadgen.TestScenario, scenario)
    test.min_query_count = queries
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
    why = "" if settings.bound is None else _missed_bound(scenario, settings.bound, observed, estimate, log)
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


def _missed_bound(scenario: Scenario, bound: float, observed: float, estimate: float, log: Mapping[str, Any]) -> str:
    """Why a bound of the 99th percentile does not hold or is not proven; empty where it is proven.

    `observed` is the percentile of the queries, and `estimate` LoadGen's upper bound of the true percentile, both in
    milliseconds.
    """
    queries = int(log["result_query_count"])
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
