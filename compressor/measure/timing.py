"""Time engines in turn, so that disturbances of the machine affect all of them.

A round is several calls of one engine in a row. A pair of rounds has one round of each of two engines; a turn has one
round of each of several engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter, process_time, sleep
from typing import Protocol

import numpy as np

from compressor.progress import ProgressCallback
from compressor.results import Latency, Note, NoteCode, Speed
from compressor.targets.base import Engine, Feeds

WARM_UP_CALLS = 3
"""Calls of each engine before timing begins."""
PROBE_CALLS = 3
"""Calls of each engine from which the number of calls and rounds is computed; a single call may be disturbed."""
ROUND_CALLS = (2, 50)
"""Minimum and maximum number of timed calls in a round."""
ROUNDS = (10, 1000)
"""Minimum and maximum number of pairs of rounds: fewer give no useful interval, and more do not narrow it."""
OVERTIME = 2
"""Multiple of the requested seconds after which no further pair begins, unless the minimum has not been reached."""
ROUND_SECONDS = 0.1
"""Planned duration of a round: longer than the scheduler's time slice, and short compared to the whole measurement.
Rounds are shorter where `_LEAST_TURNS` of them would take longer than the time that is given."""
_LEAST_TURNS = 4
"""Minimum number of rounds of each engine that is timed in turns: fewer give no median."""
QUIET_SECONDS = 0.005
"""Duration without computation after which a process counts as idle; twice in a row."""
_PATIENCE_SECONDS = 1.0
"""Longest wait for an idle process."""
CONFIDENCE = 0.95
"""Coverage of the intervals of ratios of times."""
_RESAMPLES = 2000
_RESAMPLES_OF_TURNS = 500
"""Bootstrap draws of turns that a standard error is computed from."""


class Timed(Protocol):
    """What can be timed: an engine, or any model that is called with arrays."""

    def call(self, feeds: Feeds) -> Callable[[], object]:
        """A function that computes one batch."""


def wait_until_idle() -> None:
    """Wait until no thread of this process computes.

    The threads of an ONNX Runtime session spin for tens of milliseconds after a call, in case another call follows. An
    engine that is timed meanwhile shares the cores with them, which slows down a fast engine most.
    """
    quiet, end = 0, perf_counter() + _PATIENCE_SECONDS
    while quiet < 2 and perf_counter() < end:
        spent = process_time()
        sleep(QUIET_SECONDS)
        quiet = quiet + 1 if process_time() - spent < 0.2 * QUIET_SECONDS else 0


def interleave(
    dense: Engine,
    compressed: Engine,
    feeds: Feeds,
    *,
    batch: int,
    seq: int | None,
    seconds: float = 10.0,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
) -> Speed:
    """Time two engines on the same inputs, in pairs of rounds whose order alternates.

    Before each round, the threads of the other engine become idle, and a call that is not timed loads the engine's
    weights into the caches. Both engines get the same number of rounds and calls. If the same engine is passed
    twice, the ratio is close to one and the interval shows the smallest difference that the machine can resolve.

    Args:
        batch: its number of rows, for the report and the throughput.
        seq: its length in tokens, for the report; None for a model of images or sound.
        seconds: approximate duration; at least ten pairs of rounds are timed.
        on_progress: called with (pairs timed, pairs planned).

    Returns:
        Latencies of both engines, and the ratio of the median times with a bootstrap interval over pairs of rounds.
        `void` says why the ratio must not be read as a result, or is None.
    """
    device_seconds: tuple[list[float | None], list[float | None]] = ([], [])

    def call(engine: Engine, device: list[float | None]) -> None:
        engine.run(feeds)
        device.append(engine.device_seconds)

    pairs = alternate_calls(
        lambda: call(dense, device_seconds[0]),
        lambda: call(compressed, device_seconds[1]),
        seconds,
        on_progress=on_progress,
    )
    reason = incomparable_reason(dense, compressed)
    speed = speed_of(pairs, batch=batch, seq=seq, seed=seed, device_seconds=device_seconds)
    return speed if reason is None else speed.model_copy(update={"void": reason.text})


def speed_of(
    pairs: Iterable[np.ndarray],
    *,
    batch: int,
    seq: int | None,
    seed: int,
    device_seconds: tuple[list[float | None], list[float | None]] = ([], []),
) -> Speed:
    """Latencies of two engines, and the ratio of their median times with a bootstrap interval over pairs of rounds.

    Args:
        pairs: seconds of the timed calls of each pair of rounds, see `alternate_calls`.
        seq: their length in tokens; None for a model of images or sound.
        device_seconds: seconds of every call of each engine by the device's clock; empty: it has none.
    """
    times = 1e3 * np.stack(list(pairs), axis=1)
    low, high = ratio_interval(times, seed)
    ratio = float(np.median(times[0]) / np.median(times[1]))
    return Speed(
        batch=batch,
        seq=seq,
        dense=_latency(times[0], batch, device_seconds[0]),
        compressed=_latency(times[1], batch, device_seconds[1]),
        ratio=ratio,
        # The median of all times may lie outside the quantiles of the draws where all draws are nearly equal.
        low=min(low, ratio),
        high=max(high, ratio),
        confidence=CONFIDENCE,
    )


def alternate_calls(
    first: Callable[[], object],
    second: Callable[[], object],
    seconds: float,
    *,
    wait: Callable[[], None] = wait_until_idle,
    needs_more: Callable[[], bool] | None = None,
    on_progress: ProgressCallback | None = None,
) -> Iterator[np.ndarray]:
    """Time two callables in pairs of rounds whose order alternates.

    Args:
        seconds: approximate duration, exceeded at most `OVERTIME` times; at least ten pairs are timed.
        wait: returns when no thread of earlier calls computes.
        needs_more: called once, when all planned pairs are timed; if it returns True, as many pairs are timed again, if
            time permits.
        on_progress: called with (pairs timed, pairs planned).

    Yields:
        For each pair of rounds the seconds of every timed call, `[2, calls]`.
    """
    for call in (first, second):
        for _ in range(WARM_UP_CALLS):
            call()
    start = perf_counter()
    wait()
    idle = perf_counter() - start
    pair = sum(float(np.median(timed_round(call, PROBE_CALLS, wait))) for call in (first, second))
    calls = int(np.clip(2 * ROUND_SECONDS / pair, *ROUND_CALLS))
    planned = int(np.clip(seconds / (pair * (calls + 1) + 2 * idle), *ROUNDS))
    start, number = perf_counter(), 0
    while number < planned and (number < ROUNDS[0] or perf_counter() - start < OVERTIME * seconds):
        times = np.empty((2, calls))
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            times[side] = timed_round((first, second)[side], calls, wait)
        if on_progress is not None:
            on_progress(number + 1, planned)
        yield times
        number += 1
        if number == planned and needs_more is not None and needs_more():
            planned, needs_more = 2 * planned, None


def timed_round(call: Callable[[], object], calls: int, wait: Callable[[], None]) -> list[float]:
    """Seconds of each timed call of one round, which begins with a call that is not timed.

    Args:
        call: calls the engine once; its attribute `prepare`, if any, is called before it, and is not timed.
        wait: called first; returns when no thread of earlier calls computes.
    """
    prepare: Callable[[], None] = getattr(call, "prepare", lambda: None)
    wait()
    call()
    times = []
    for _ in range(calls):
        prepare()
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return times


def _latency(times: np.ndarray, batch: int, device_seconds: list[float | None]) -> Latency:
    """The latency of an engine from the milliseconds of its timed calls, `[rounds, calls]`.

    `device_seconds` has the time of every call, warm-up included, by the device's clock; None: it has no clock.
    """
    p50, p90, p99 = np.quantile(times, [0.5, 0.9, 0.99])
    rounds, calls = times.shape
    known = [seconds for seconds in device_seconds[-rounds * (calls + 1) :] if seconds is not None]
    device = None
    if len(known) == rounds * (calls + 1):
        timed = 1e3 * np.reshape(known, (rounds, calls + 1))[:, 1:]  # the first call of a round is not timed
        device = tuple(float(quantile) for quantile in np.quantile(timed, [0.5, 0.9, 0.99]))
    samples = tuple(round(float(sample), 6) for sample in times.ravel())
    return Latency(
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        throughput=float(batch * 1e3 / times.mean()),
        samples=samples,
        device=device,
    )


def ratio_interval(times: np.ndarray, seed: int) -> tuple[float, float]:
    """Bootstrap bounds, at `CONFIDENCE`, of the ratio of the first engine's median time to the second's.

    The bootstrap draws pairs of rounds, not calls, because neighbouring calls are disturbed together.

    Args:
        times: `[2, rounds, calls]`.
    """
    rng = np.random.default_rng(seed)
    rounds = times.shape[1]
    draws = rng.integers(0, rounds, (_RESAMPLES, rounds))
    ratios = np.concatenate(
        [np.divide(*np.median(times[:, part], axis=(2, 3))) for part in np.array_split(draws, _RESAMPLES // 10)]
    )
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


_PRECISION_SETTINGS = frozenset(("precision", "types", "inference_precision"))
"""Settings of a session in which two engines that are compared may differ."""


def incomparable_reason(dense: Engine, compressed: Engine) -> Note | None:
    """Why the times of two engines must not be compared; None where they may be.

    Engines of one runtime must have the same settings apart from their precision. If they have the same precision too,
    the runtime must have fused the same share of the attentions of both graphs. Engines of different runtimes must use
    the same number of threads, unless one of them runs on a GPU.
    """
    same_runtime = dense.session.get("runtime") == compressed.session.get("runtime")
    first, second = (
        {name: value for name, value in engine.session.items() if name not in _PRECISION_SETTINGS}
        for engine in (dense, compressed)
    )
    threads = {session["intra_op_threads"] for session in (first, second) if "intra_op_threads" in session}
    if first != second if same_runtime else len(threads) > 1:
        return Note(text="the two engines run with different settings", code=NoteCode.SETTINGS_DIFFER)
    if not same_runtime or dense.precision != compressed.precision:
        return None
    if dense.fused * compressed.attentions != compressed.fused * dense.attentions:
        return Note(
            text=f"the runtime fused {dense.fused} of {dense.attentions} attentions of the dense graph and"
            f" {compressed.fused} of {compressed.attentions} of the compressed graph",
            code=NoteCode.FUSION_DIFFERS,
        )
    return None


def median_times(engines: Sequence[Timed], feeds: Feeds, seconds: float) -> list[float]:
    """Median seconds of a call of each engine, timed in turns; every second turn is in reverse order.

    Args:
        seconds: approximate duration; at least four rounds of each engine are timed.
    """
    turns = list(_turns(engines, feeds, seconds))
    return [float(np.median([call for turn in turns for call in turn[index]])) for index in range(len(engines))]


def paired_times(engines: Sequence[Timed], feeds: Feeds, seconds: float) -> list[float]:
    """Seconds of a call of each engine, with ratios that a disturbed machine repeats.

    The speed of a shared machine changes within seconds, and small engines lose more than large ones. The time of an
    engine is the median time of the first engine, the control, multiplied by the median over turns of the ratio of
    both. These ratios repeat far better than ratios of medians, especially between similar engines.

    Args:
        engines: the engines; the first one is the control.
        seconds: approximate duration; at least four rounds of each engine are timed.
    """
    medians = _medians(engines, feeds, seconds)
    ratios = np.median(medians / medians[:, :1], axis=0)
    return (np.median(medians[:, 0]) * ratios).tolist()


def paired_ratios(engines: Sequence[Timed], feeds: Feeds, seconds: float) -> list[tuple[float, float]]:
    """Ratio of the time of each further engine to that of the first, the control, and its standard error.

    The arguments are those of `paired_times`. A ratio is the median over turns, as there; its error is that of a
    bootstrap over turns.
    """
    medians = _medians(engines, feeds, seconds)
    ratios = medians[:, 1:] / medians[:, :1]
    draws = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLES_OF_TURNS, len(ratios)))
    errors = np.median(ratios[draws], axis=1).std(axis=0)
    return list(zip(np.median(ratios, axis=0).tolist(), errors.tolist(), strict=True))


def _medians(engines: Sequence[Timed], feeds: Feeds, seconds: float) -> np.ndarray:
    """Median seconds of a call of each engine in each turn, `[turns, engines]`."""
    return np.array([[np.median(times) for times in turn] for turn in _turns(engines, feeds, seconds)])


def _turns(engines: Sequence[Timed], feeds: Feeds, seconds: float) -> Iterator[list[list[float]]]:
    """Seconds of every timed call of each engine in each turn."""
    calls = [engine.call(feeds) for engine in engines]
    for call in calls:
        for _ in range(WARM_UP_CALLS):
            call()
    planned = min(ROUND_SECONDS, seconds / (_LEAST_TURNS * len(engines)))
    start, number = perf_counter(), 0
    while number < _LEAST_TURNS or perf_counter() - start < seconds:
        times: list[list[float]] = [[] for _ in engines]
        order = range(len(engines)) if number % 2 == 0 else reversed(range(len(engines)))
        for index in order:
            probe = timed_round(calls[index], 1, wait_until_idle)[0]
            repeats = int(np.clip(planned / probe, *ROUND_CALLS))
            times[index] = timed_round(calls[index], repeats, lambda: None)
        yield times
        number += 1
