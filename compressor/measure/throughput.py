"""Throughput: rows a second with several callers at once, each with an engine of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from compressor.targets.base import Engine, Feeds

_WARM_UP_CALLS = 2


def rows_per_second(engines: Sequence[Engine], feeds: Feeds, *, batch: int, seconds: float) -> float:
    """Rows that several callers compute in a second.

    Each caller is a thread that calls its own engine again and again. Calls that end after `seconds` are not counted.

    Args:
        engines: one engine for each caller.
        feeds: one batch of inputs.
        batch: its number of rows.
        seconds: duration.

    Raises:
        CompressorError: an engine cannot run on these inputs.
    """
    for engine in engines:
        for _ in range(_WARM_UP_CALLS):
            engine.run(feeds)
    calls = [0] * len(engines)
    ready = threading.Barrier(len(engines) + 1)
    end = threading.Event()

    def call(number: int) -> None:
        ready.wait()
        while not end.is_set():
            engines[number].run(feeds)
            calls[number] += not end.is_set()

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(engines))]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    end.wait(seconds)
    end.set()
    duration = time.perf_counter() - start
    for thread in threads:
        thread.join()
    return batch * sum(calls) / duration
