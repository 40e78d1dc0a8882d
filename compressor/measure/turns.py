"""Time several engines in rounds in turn, so that disturbances of the machine affect all of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from compressor.measure.timing import ROUND_CALLS, ROUND_SECONDS, WARM_UP_CALLS, Clock, timed_round, wait_until_idle
from compressor.targets.base import Engine, Feeds

_RESAMPLES = 500
"""Bootstrap draws of turns that a standard error is computed from."""


def median_times(
    engines: Sequence[Engine],
    feeds: Feeds,
    seconds: float,
    *,
    wait: Callable[[], None] = wait_until_idle,
    clock: Clock | None = None,
) -> list[float]:
    """Median seconds of a call of each engine, timed in rounds in turn; every second turn goes backwards.

    Args:
        engines: the engines.
        feeds: one batch of inputs.
        seconds: approximate duration; at least four rounds of each engine are timed.
        wait: returns when no thread of earlier calls computes.
        clock: returns seconds; None: `time.perf_counter`.
    """
    turns = list(_turns(engines, feeds, seconds, wait, clock))
    return [float(np.median([call for turn in turns for call in turn[index]])) for index in range(len(engines))]


def paired_times(
    engines: Sequence[Engine],
    feeds: Feeds,
    seconds: float,
    *,
    wait: Callable[[], None] = wait_until_idle,
    clock: Clock | None = None,
) -> list[float]:
    """Seconds of a call of each engine, whose ratios repeat on a machine that is disturbed.

    The speed of a shared machine changes within seconds, and small engines lose more than large ones. The time of an
    engine is the median time of the first engine, the control, multiplied by the median ratio of both in a turn. Such
    ratios repeat far better than ratios of medians, especially between engines that are alike.

    Args:
        engines: the engines; the first one is the control.
        feeds: one batch of inputs.
        seconds: approximate duration; at least four rounds of each engine are timed.
        wait: returns when no thread of earlier calls computes.
        clock: returns seconds; None: `time.perf_counter`.
    """
    medians = _medians(engines, feeds, seconds, wait, clock)
    ratios = np.median(medians / medians[:, :1], axis=0)
    times: list[float] = (np.median(medians[:, 0]) * ratios).tolist()
    return times


def paired_ratios(
    engines: Sequence[Engine],
    feeds: Feeds,
    seconds: float,
    *,
    wait: Callable[[], None] = wait_until_idle,
    clock: Clock | None = None,
) -> list[tuple[float, float]]:
    """The time of each engine but the control relative to the control's, and the standard error of this ratio.

    A ratio is the median over turns, as in `paired_times`; its error is by the bootstrap over turns.

    Args:
        engines: the engines; the first one is the control.
        feeds: one batch of inputs.
        seconds: approximate duration; at least four rounds of each engine are timed.
        wait: returns when no thread of earlier calls computes.
        clock: returns seconds; None: `time.perf_counter`.
    """
    medians = _medians(engines, feeds, seconds, wait, clock)
    ratios = medians[:, 1:] / medians[:, :1]
    draws = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    errors = np.median(ratios[draws], axis=1).std(axis=0)
    return list(zip(np.median(ratios, axis=0).tolist(), errors.tolist(), strict=True))


def _medians(
    engines: Sequence[Engine], feeds: Feeds, seconds: float, wait: Callable[[], None], clock: Clock | None
) -> np.ndarray:
    """Median seconds of a call of each engine in each turn, `[turns, engines]`."""
    turns = _turns(engines, feeds, seconds, wait, clock)
    return np.array([[np.median(times) for times in turn] for turn in turns])


def _turns(
    engines: Sequence[Engine], feeds: Feeds, seconds: float, wait: Callable[[], None], clock: Clock | None
) -> Iterator[list[list[float]]]:
    """Seconds of every timed call of each engine, turn by turn; every second turn goes backwards."""
    clock = clock or time.perf_counter
    calls = [functools.partial(engine.run, feeds) for engine in engines]
    for call in calls:
        for _ in range(WARM_UP_CALLS):
            call()
    start, number = clock(), 0
    while number < 4 or clock() - start < seconds:
        times: list[list[float]] = [[] for _ in engines]
        order = range(len(engines)) if number % 2 == 0 else reversed(range(len(engines)))
        for index in order:
            probe = timed_round(calls[index], 1, wait, clock)[0]
            repeats = int(np.clip(ROUND_SECONDS / probe, *ROUND_CALLS))
            times[index] = timed_round(calls[index], repeats, lambda: None, clock)
        yield times
        number += 1
