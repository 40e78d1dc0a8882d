"""Two engines timed in turn, so that whatever the machine does meanwhile happens to both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from compressor.progress import ProgressCallback
from compressor.results import Latency, Speed
from compressor.targets.base import Engine, Feeds

_WARM_UPS = 3
_BLOCK_SECONDS = 0.1
"""A block should be longer than the scheduler's time slice, and short beside the whole."""
_BLOCKS = (10, 100)
"""Fewest and most pairs of blocks: fewer make no interval."""
_CALLS = (2, 50)
"""Fewest and most timed calls a block."""
_TRIED = 3
"""Calls that tell how long one takes: a single one may have been disturbed."""
_LONGEST = 2
"""Times the seconds that were asked for, after which no block is begun, but for the fewest."""
_QUIET_SECONDS = 0.005
"""How long all threads of the process must rest for it to count as quiet; twice in a row."""
_PATIENCE_SECONDS = 1.0
"""Longest wait for that."""
_RESAMPLES = 2000


def interleave(
    dense: Engine,
    compressed: Engine,
    feeds: Feeds,
    *,
    batch: int,
    seq: int | None,
    seconds: float = 10.0,
    seed: int = 0,
    confidence: float = 0.95,
    tell: ProgressCallback | None = None,
) -> Speed:
    """Time both engines on the same inputs, block by block, the order turned around from one pair to the next.

    Before each block the other engine's threads come to rest (see `wait_until_idle`), and a call that is not timed fetches the
    engine's weights back into the caches. Both sides get the same number of blocks and calls. Passing the same engine
    twice tells how small a difference this machine can resolve at the moment (its ratio is one, and the interval says
    how surely).

    Args:
        dense, compressed: the engines.
        feeds: one batch.
        batch, seq: its size, for the record and the throughput.
        seconds: about how long to measure; never fewer than ten pairs of blocks.
        seed: of the bootstrap.
        confidence: share of the bootstrap's draws inside the interval.
        tell: hears of every pair of blocks.

    Returns:
        Latencies, and the ratio of the medians with a bootstrap interval over pairs of blocks. `incomparable_reason` says why the two
        must not be compared, if so.
    """
    clocks: tuple[list[float | None], list[float | None]] = ([], [])

    def call(engine: Engine, clock: list[float | None]) -> None:
        engine.run(feeds)
        clock.append(engine.device_seconds)

    pairs = alternate_calls(lambda: call(dense, clocks[0]), lambda: call(compressed, clocks[1]), seconds, tell=tell)
    times = 1e3 * np.stack(list(pairs), axis=1)
    low, high = ratio_interval(times, seed, confidence)
    ratio = float(np.median(times[0]) / np.median(times[1]))
    return Speed(
        batch=batch,
        seq=seq,
        dense=_latency(times[0], batch, clocks[0]),
        compressed=_latency(times[1], batch, clocks[1]),
        ratio=ratio,
        # The median of all may lie outside the quantiles of the draws where all draws are alike.
        low=min(low, ratio),
        high=max(high, ratio),
        confidence=confidence,
        void=incomparable_reason(dense, compressed),
    )


def alternate_calls(
    one: Callable[[], object],
    other: Callable[[], object],
    seconds: float,
    *,
    rest: Callable[[], None] | None = None,
    undecided: Callable[[], bool] | None = None,
    tell: ProgressCallback | None = None,
) -> Iterator[np.ndarray]:
    """Seconds that calls of the one and the other take, `[2, call]`, for one pair of blocks after another.

    Args:
        one, other: do one call each.
        seconds: about how long to measure, at most twice that; never fewer than ten pairs.
        rest: waits until what ran before is quiet; else `wait_until_idle`.
        undecided: is asked once, when all is measured; if so, as many pairs follow, as far as time is left.
        tell: hears of every pair.
    """
    rest = rest or wait_until_idle
    for call in (one, other):
        for _ in range(_WARM_UPS):
            call()
    start = time.perf_counter()
    rest()
    idle = time.perf_counter() - start
    pair = sum(float(np.median(_block(call, _TRIED, rest))) for call in (one, other))
    calls = int(np.clip(2 * _BLOCK_SECONDS / pair, *_CALLS))
    blocks = int(np.clip(seconds / (pair * (calls + 1) + 2 * idle), *_BLOCKS))
    start, block = time.perf_counter(), 0
    while block < blocks and (block < _BLOCKS[0] or time.perf_counter() - start < _LONGEST * seconds):
        times = np.empty((2, calls))
        for side in (0, 1) if block % 2 == 0 else (1, 0):
            times[side] = _block((one, other)[side], calls, rest)
        if tell is not None:
            tell(block + 1, blocks)
        yield times
        block += 1
        if block == blocks and undecided is not None and undecided():
            blocks, undecided = 2 * blocks, None


def wait_until_idle() -> None:
    """Wait until no thread of this process computes any more.

    The threads of an ONNX Runtime session spin on for tens of milliseconds after a call, in case another comes; an
    engine that is timed meanwhile has to share its cores with them, and the faster it is, the more of its calls.
    """
    quiet, end = 0, time.perf_counter() + _PATIENCE_SECONDS
    while quiet < 2 and time.perf_counter() < end:
        spent = time.process_time()
        time.sleep(_QUIET_SECONDS)
        quiet = quiet + 1 if time.process_time() - spent < 0.2 * _QUIET_SECONDS else 0


def _block(call: Callable[[], object], calls: int, rest: Callable[[], None]) -> list[float]:
    rest()
    call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _latency(times: np.ndarray, batch: int, clock: list[float | None]) -> Latency:
    """From the milliseconds of every timed call `[blocks, calls]`, and the device's seconds of every call there was."""
    p50, p90, p99 = np.quantile(times, [0.5, 0.9, 0.99])
    blocks, calls = times.shape
    known = [seconds for seconds in clock[-blocks * (calls + 1) :] if seconds is not None]
    device = None
    if len(known) == blocks * (calls + 1):
        timed = 1e3 * np.reshape(known, (blocks, calls + 1))[:, 1:]  # the first of a block fetches the weights
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


def ratio_interval(times: np.ndarray, seed: int, confidence: float) -> tuple[float, float]:
    """Bounds of dense p50 over compressed p50, for `times` `[2, blocks, calls]`: pairs of blocks are drawn, not calls,
    for what disturbs one call disturbs its neighbours."""
    rng = np.random.default_rng(seed)
    blocks = times.shape[1]
    drawn = rng.integers(0, blocks, (_RESAMPLES, blocks))
    ratios = [float(np.median(times[0, chosen]) / np.median(times[1, chosen])) for chosen in drawn]
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def incomparable_reason(dense: Engine, compressed: Engine) -> str | None:
    """Why the times of two engines must not be compared, or None.

    The runtime must have fused the same share of the attentions that each graph has. One without any needs none.
    """
    if dense.session != compressed.session or dense.precision != compressed.precision:
        return "the two engines run with different settings"
    if dense.attentions and compressed.attentions:
        one, other = (dense.fused, dense.attentions), (compressed.fused, compressed.attentions)
        if one[0] * other[1] != other[0] * one[1]:
            return (
                f"the runtime fused {one[0]} of {one[1]} attentions of the dense graph and {other[0]} of {other[1]} of "
                "the compressed one"
            )
    return None


def saved_share(speed: Speed, macs_dense: int, macs_compressed: int) -> float:
    """Share of time saved over share of multiply-accumulates removed.

    `(1 - p50_compressed / p50_dense) / (1 - macs_compressed / macs_dense)`: one where time falls as arithmetic does.

    Raises:
        ValueError: no multiply-accumulates were removed.
    """
    if macs_compressed >= macs_dense:
        raise ValueError(f"{macs_dense} multiply-accumulates before, {macs_compressed} after: none were removed")
    return (1 - 1 / speed.ratio) / (1 - macs_compressed / macs_dense)
