"""Absolute bounds and throughput, measured by MLCommons LoadGen: SingleStream, Server and Offline."""

from __future__ import annotations

import contextlib
import json
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from compressor.config.check import Scenario
from compressor.errors import TargetMissingError
from compressor.latency.verdict import Load

PERCENTILE = 0.99
FEWEST = 662
"""Queries that LoadGen needs to bound a 99th percentile with 99% confidence."""
MORE = 4 * FEWEST
"""Queries that a bound is tried again with that the first ones kept and did not prove: of the fewest, the slowest one
decides."""
_LONGEST = 10
"""A scenario sends no more queries after so many times the seconds that it should take, and waits as long again for
those sent."""


def measure(
    scenario: Scenario,
    calls: Sequence[Callable[[], object]],
    *,
    batch: int,
    p50: float,
    bound: float | None,
    rate: float,
    seconds: float,
    at_once: int,
    fewest: int = FEWEST,
    on_fault: Callable[[BaseException], object] = lambda error: None,
) -> Load:
    """Run one scenario, to its end: LoadGen cannot be stopped (see `compressor.latency.loadgen_process`).

    - SingleStream: one query after the other; the bound is on LoadGen's estimate of the 99th percentile, which is
      above the true one with 99% confidence.
    - Server: queries arrive at random (Poisson) at `rate`; the bound has to hold for 99% of them, with 99% confidence.
    - Offline: everything at once; throughput.

    Args:
        calls: the queries, taken in turn; each does one call.
        batch: samples of a call.
        p50: milliseconds of a call, about.
        bound: milliseconds; None: measured, not gated on.
        rate: queries a second (Server).
        seconds: least duration.
        at_once: queries of the Server and Offline scenarios that are under way at the same time, at most.
        fewest: queries at least, but for Offline.
        on_fault: is told what a call raised first, at once, in the thread of that call.

    Raises:
        TargetMissingError: LoadGen is not installed.
        Exception: what a call raised.
    """
    loadgen = library()
    settings = loadgen.TestSettings()
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.scenario = getattr(loadgen.TestScenario, scenario)
    settings.min_query_count = 1 if scenario == "Offline" else fewest
    settings.min_duration_ms = int(1e3 * seconds)
    due = settings.min_query_count * p50
    if scenario == "SingleStream":
        settings.single_stream_expected_latency_ns = max(1, int(1e6 * p50))
        settings.single_stream_target_latency_percentile = PERCENTILE
    elif scenario == "Server":
        settings.server_target_qps = rate
        due = max(due, 1e3 * fewest / rate)
        settings.server_target_latency_ns = int(1e6 * (bound if bound is not None else 1e3 * seconds))
        settings.server_target_latency_percentile = PERCENTILE
    else:
        settings.offline_expected_qps = 1e3 / p50
    longest = _LONGEST * max(1e3 * seconds, due)
    settings.max_duration_ms = int(longest)
    limit, faults = 2e-3 * longest, list[BaseException]()
    workers = _workers(loadgen, calls, at_once, limit, faults, on_fault)
    with tempfile.TemporaryDirectory() as folder, workers as issue:
        output = loadgen.LogOutputSettings()
        output.outdir, output.copy_summary_to_stdout = folder, False
        logs = loadgen.LogSettings()
        logs.log_output, logs.enable_trace = output, False
        sut, samples = (
            loadgen.ConstructSUT(issue, lambda: None),
            loadgen.ConstructQSL(len(calls), len(calls), *[_skip] * 2),
        )
        try:
            loadgen.StartTestWithLogSettings(sut, samples, settings, logs)
        finally:
            loadgen.DestroyQSL(samples)
            loadgen.DestroySUT(sut)
        if faults:
            if isinstance(faults[0], _LateError):
                why = f"not done within {limit:.0f} s; more queries arrive than are answered"
                asked = rate if scenario == "Server" else None
                return Load(scenario=scenario, queries=0, rate=asked, bound=bound, holds=False, why=why)
            raise faults[0]
        return _read(scenario, _logged(Path(folder) / "mlperf_log_detail.txt"), batch, rate, bound)


def library() -> Any:
    """LoadGen's module.

    Raises:
        TargetMissingError: it is not installed.
    """
    try:
        import mlperf_loadgen
    except ImportError as error:
        raise TargetMissingError("MLCommons LoadGen is not installed; pip install 'compressor[serving]'") from error
    return mlperf_loadgen


def _skip(samples: object) -> None:
    """Samples are in memory already."""


class _LateError(Exception):
    """The scenario's time is over."""


@contextlib.contextmanager
def _workers(
    loadgen: Any,
    calls: Sequence[Callable[[], object]],
    count: int,
    seconds: float,
    faults: list[BaseException],
    on_fault: Callable[[BaseException], object],
) -> Iterator[Callable[[Sequence[Any]], None]]:
    """A function that takes queries for `count` threads to answer; what goes wrong there is added to `faults`.

    After a fault, or so many seconds, queries are only ticked off: LoadGen waits for every one that it has sent.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end = time.monotonic() + seconds

    def work() -> None:
        while (sample := waiting.get()) is not None:
            if not faults and time.monotonic() > end:
                faults.append(_LateError())
            if not faults:
                try:
                    calls[sample.index]()
                except BaseException as error:
                    faults.append(error)
                    if error is faults[0]:  # others may fail at the same moment
                        on_fault(error)
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
        for _ in threads:
            waiting.put(None)
        for thread in threads:
            thread.join()


def _logged(path: Path) -> dict[str, Any]:
    """LoadGen's results by key; the last one counts."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    entries = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith(":::MLLOG ")]
    return {entry["key"]: entry["value"] for entry in entries}


def _read(scenario: Scenario, found: dict[str, Any], batch: int, rate: float, bound: float | None) -> Load:
    if scenario == "Offline":
        done = batch * float(found["result_samples_per_second"])
        count = int(found.get("effective_samples_per_query", 0) or found["generated_samples_per_query"])
        return Load(scenario=scenario, queries=count, samples_per_second=done)
    queries = int(found["result_query_count"])
    observed = 1e-6 * float(found[f"result_{100 * PERCENTILE:.2f}_percentile_latency_ns"])
    late = 1e-6 * float(found.get("early_stopping_latency_ss") or 0) or observed
    if bound is None:
        why = ""
    elif queries < FEWEST:
        why = f"{queries} queries are too few to bound a 99th percentile"
    elif observed > bound:
        over = int(found.get("result_overlatency_query_count", 0))
        some = f", {over} of {queries} queries took longer" if over else ""
        why = f"p99 {observed:.3f} ms is beyond the bound of {bound:g} ms{some}"
    elif late > bound or (scenario == "Server" and found["result_validity"] != "VALID"):
        most = f": it may be {late:.3f} ms" if late > bound else ""
        why = f"p99 {observed:.3f} ms keeps the bound of {bound:g} ms, but {queries} queries do not prove it{most}"
    else:
        why = ""
    return Load(
        scenario=scenario,
        queries=queries,
        rate=rate if scenario == "Server" else None,
        percentile=PERCENTILE,
        observed=observed,
        milliseconds=late,
        bound=bound,
        holds=not why,
        why=why,
    )
