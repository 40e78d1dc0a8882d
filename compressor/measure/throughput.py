"""Throughput: rows per second with several callers at once, each with a separate engine."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from compressor.measure.timing import wait_until_idle
from compressor.results import RowRates
from compressor.targets import Engine, Feeds, target_of
from compressor.targets.machine import usable_cores

_WARM_UP_CALLS = 2
_MEMORY_SHARE = 0.5
"""Share of the free memory that the engines of all callers may take."""


def rows_per_second(engines: Sequence[Engine], feeds: Feeds, *, batch: int, seconds: float) -> float:
    """Rows per second of several callers at once.

    Each caller is a thread that calls its engine repeatedly for `seconds`, and at least once. Its rate is counted until
    the end of its last call.

    Raises:
        CompressorError: an engine cannot run on these inputs.
    """
    for engine in engines:
        for _ in range(_WARM_UP_CALLS):
            engine.run(feeds)
    ready = threading.Barrier(len(engines))

    def calls_per_second(engine: Engine) -> float:
        ready.wait()
        calls, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or not calls:
            engine.run(feeds)
            calls += 1
        return calls / elapsed

    with ThreadPoolExecutor(len(engines)) as callers:
        return batch * sum(callers.map(calls_per_second, engines))


def affordable_callers(engines: Iterable[tuple[Engine, int | None]]) -> int:
    """Number of callers to measure the throughput of: one per core, if the memory holds an engine for each.

    Args:
        engines: engines to measure one after another, each with its peak memory in bytes; every caller loads its copy.

    Returns:
        The number of callers; 1 where an engine runs on a GPU, which has a single queue.
    """
    engines = list(engines)
    if not all("CPU" in str(engine.session.get("provider")) for engine, _ in engines):
        return 1
    largest = max((size for _, size in engines if size), default=1)
    affordable = int(_MEMORY_SHARE * psutil.virtual_memory().available / largest)
    return max(1, min(usable_cores(), affordable))


def row_rates(engine: Engine, inputs: Sequence[tuple[int, Feeds]], callers: int, seconds: float) -> list[RowRates]:
    """Rows per second of an engine.

    Args:
        callers: number of callers at once, each of which loads a copy of the engine with one thread.
        seconds: approximate duration of each of two measurements for each batch.

    Raises:
        CompressorError: the engine cannot be loaded, or cannot run on these inputs.
    """
    kernel = engine.session.get("kernel")
    load = functools.partial(target_of(engine.path).load, engine.path, provider="cpu", threads=1, cached=False)
    loaded = [load(kernel=Path(kernel) if kernel else None) for _ in range(callers)]
    rates = []
    for batch, feeds in inputs:
        wait_until_idle()
        one_caller = rows_per_second([engine], feeds, batch=batch, seconds=seconds)
        wait_until_idle()
        rates.append(
            RowRates(one_caller=one_caller, all_callers=rows_per_second(loaded, feeds, batch=batch, seconds=seconds))
        )
    return rates
