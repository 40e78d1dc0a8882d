"""Threads that answer the queries of a LoadGen scenario."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class LateError(Exception):
    """The time limit of the scenario has passed."""


@contextlib.contextmanager
def query_workers(
    loadgen: Any,
    calls: Sequence[Callable[[], object]],
    count: int,
    seconds: float,
    errors: list[BaseException],
    on_error: Callable[[BaseException], object],
) -> Iterator[Callable[[Sequence[Any]], None]]:
    """Start threads that answer queries, and yield the function with which LoadGen issues its samples to them.

    After the first error or the time limit, queries are completed without a call, because LoadGen waits for every query
    that it has issued.

    Args:
        loadgen: LoadGen's module.
        calls: the calls; the sample's index selects one.
        count: number of threads.
        seconds: time limit, after which no call is made.
        errors: receives the exceptions of calls, and LateError after the time limit.
        on_error: receives the first exception of a call, in the thread of that call.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end = time.monotonic() + seconds

    def work() -> None:
        while (sample := waiting.get()) is not None:
            if not errors and time.monotonic() > end:
                errors.append(LateError())
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
        for _ in threads:
            waiting.put(None)
        for thread in threads:
            thread.join()
