"""Timing in turn: rounds alternate, intervals cover the truth, ratios repeat, and some times are not comparable."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.measure import interleave, median_times, paired_ratios, paired_times, timing
from compressor.measure.timing import (
    OVERTIME,
    PROBE_CALLS,
    QUIET_SECONDS,
    ROUNDS,
    WARM_UP_CALLS,
    alternate_calls,
    incomparable_reason,
    wait_until_idle,
)
from compressor.results import NoteCode, Speed
from compressor.targets.base import Feeds
from tests.targets.engines import FakeClock, FakeEngine, NoisyEngine


@pytest.fixture(autouse=True)
def _all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rounds and as long waits as outside of tests."""
    monkeypatch.setattr(timing, "ROUNDS", ROUNDS)
    monkeypatch.setattr(timing, "QUIET_SECONDS", QUIET_SECONDS)


@contextmanager
def timed_by(clock: FakeClock, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Times are those of a clock, and `wait` replaces the wait for idle threads."""
    with patch.multiple(timing, perf_counter=clock.read, sleep=lambda _: None, wait_until_idle=wait):
        yield


def timed(dense: FakeEngine, compressed: FakeEngine, **options: Any) -> tuple[Speed, FakeClock]:
    """The row of two engines on a clock that advances only with their calls."""
    clock = FakeClock(dense, compressed)
    with timed_by(clock):
        return interleave(dense, compressed, {}, batch=4, seq=8, **options), clock


def test_each_engine_has_its_own_times() -> None:
    speed, _ = timed(FakeEngine(2.0), FakeEngine(1.0))
    assert speed.ratio == pytest.approx(2.0)
    assert (speed.low, speed.high) == pytest.approx((2.0, 2.0))
    assert (speed.dense.p50, speed.dense.p99, speed.compressed.p90) == pytest.approx((2.0, 2.0, 1.0))
    assert (speed.dense.throughput, speed.compressed.throughput) == pytest.approx((2000.0, 4000.0))
    assert speed.void is None
    assert (speed.batch, speed.seq) == (4, 8)


def test_rounds_alternate_and_so_does_their_order() -> None:
    dense, compressed = FakeEngine(30.0), FakeEngine(20.0)
    speed, clock = timed(dense, compressed, seconds=2.0)
    calls = clock.calls[2 * WARM_UP_CALLS + 2 * (PROBE_CALLS + 1) :]
    samples = len(speed.dense.samples)
    length = samples // (len(calls) // 2 - samples) + 1  # the first call of a round is not timed
    rounds = [calls[start : start + length] for start in range(0, len(calls), length)]
    assert all(len(set(engines)) == 1 and len(engines) == length for engines in rounds)
    order = [engines[0] for engines in rounds]
    assert order[:6] == [dense, compressed, compressed, dense, dense, compressed]
    assert order.count(dense) == order.count(compressed) >= ROUNDS[0]
    assert samples == len(speed.compressed.samples)
    assert clock.now < 2 * 2.0


@pytest.mark.parametrize("is_needed", [False, True])
def test_the_number_of_rounds_is_doubled_once_if_more_are_needed(is_needed: bool) -> None:
    clock, pairs_so_far = FakeClock(), []

    def needs_more() -> bool:
        pairs_so_far.append(len(pairs))
        return is_needed

    def call() -> None:
        clock.now += 0.03

    pairs: list[np.ndarray] = []
    with timed_by(clock):
        for pair in alternate_calls(call, call, 5.0, needs_more=needs_more):
            pairs.append(pair)
    assert len(pairs_so_far) == 1
    assert len(pairs) == pairs_so_far[0] * (1 + is_needed)
    assert len({pair.shape for pair in pairs}) == 1


def test_progress_counts_pairs_of_rounds() -> None:
    clock, progress = FakeClock(), []

    def call() -> None:
        clock.now += 0.03

    def on_progress(done: int, total: int) -> None:
        progress.append((done, total))

    with timed_by(clock):
        pairs = list(alternate_calls(call, call, 5.0, on_progress=on_progress))
    assert progress == [(number + 1, len(pairs)) for number in range(len(pairs))]


@pytest.mark.parametrize("milliseconds", [1, 5, 20])
def test_more_seconds_are_used(milliseconds: int) -> None:
    clock = FakeClock()

    def call() -> None:
        clock.now += 1e-3 * milliseconds

    with timed_by(clock):
        list(alternate_calls(call, call, 60.0))
    assert clock.now == pytest.approx(60.0, rel=0.1)


def test_timing_ends_on_a_machine_that_slows_down() -> None:
    clock, calls = FakeClock(), itertools.count()

    def call() -> None:
        clock.now += 0.001 if next(calls) < 2000 else 0.01

    with timed_by(clock):
        pairs = list(alternate_calls(call, call, 5.0))
    assert ROUNDS[0] <= len(pairs) < 40, "fewer than planned"
    assert clock.now < (OVERTIME + 0.5) * 5.0


def test_timing_waits_for_busy_threads() -> None:
    is_finished = threading.Event()

    def keep_busy() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        is_finished.set()

    threading.Thread(target=keep_busy).start()
    wait_until_idle()
    assert is_finished.is_set()


def test_an_engine_against_itself_is_as_fast() -> None:
    engine = FakeEngine(5.0)
    speed, _ = timed(engine, engine)
    assert speed.ratio == pytest.approx(1.0)
    assert speed.void is None


def test_the_interval_covers_the_true_ratio_and_shrinks_with_time() -> None:
    short, _ = timed(NoisyEngine(3.0, 1), NoisyEngine(2.0, 2), seconds=1.0)
    long, _ = timed(NoisyEngine(3.0, 1), NoisyEngine(2.0, 2), seconds=20.0)
    for speed in (short, long):
        assert speed.low <= speed.ratio <= speed.high
    assert long.low < 1.5 < long.high
    assert long.high - long.low < short.high - short.low
    again, _ = timed(NoisyEngine(3.0, 1), NoisyEngine(2.0, 2), seconds=1.0)
    assert again == short, "the same seed and the same times give the same row"


class DeviceEngine(FakeEngine):
    """An engine that spends half of each call on a device that has its own clock."""

    def run(self, feeds: Any) -> dict[str, np.ndarray]:
        self.device_seconds = self.milliseconds / 2e3
        return super().run(feeds)


def test_device_times_are_reported_if_the_device_has_a_clock() -> None:
    speed, _ = timed(DeviceEngine(4.0), FakeEngine(2.0))
    assert speed.dense.device == pytest.approx((2.0, 2.0, 2.0))
    assert speed.compressed.device is None


@pytest.mark.parametrize(
    ("dense", "compressed", "code"),
    [
        ({"attentions": 12, "fused": 12}, {"attentions": 5, "fused": 5}, None),
        ({"attentions": 12, "fused": 12}, {"attentions": 0, "fused": 0}, None),
        ({"attentions": 12, "fused": 0}, {"attentions": 5, "fused": 0}, None),
        ({"attentions": 12, "fused": 6}, {"attentions": 4, "fused": 2}, None),
        ({"attentions": 12, "fused": 12}, {"attentions": 5, "fused": 4}, NoteCode.FUSION_DIFFERS),
        ({"attentions": 12, "fused": 0}, {"attentions": 5, "fused": 5}, NoteCode.FUSION_DIFFERS),
        ({"session": {"threads": 1}}, {"session": {"threads": 2}}, NoteCode.SETTINGS_DIFFER),
        ({"precision": "int8", "fused": 0}, {"precision": "fp32"}, None),
        ({"session": {"precision": "fp32"}}, {"session": {"precision": "int8"}, "precision": "int8"}, None),
        ({"session": {"runtime": "a", "intra_op_threads": 2}}, {"session": {"runtime": "b", "device": 0}}, None),
        (
            {"session": {"runtime": "a", "intra_op_threads": 2}},
            {"session": {"runtime": "b", "intra_op_threads": 2}},
            None,
        ),
        (
            {"session": {"runtime": "a", "intra_op_threads": 2}},
            {"session": {"runtime": "b", "intra_op_threads": 1}},
            NoteCode.SETTINGS_DIFFER,
        ),
    ],
)
def test_engines_that_are_not_comparable_make_the_row_void(
    dense: dict[str, Any], compressed: dict[str, Any], code: NoteCode | None
) -> None:
    engines = FakeEngine(**dense), FakeEngine(**compressed)
    reason = incomparable_reason(*engines)
    assert (None if reason is None else reason.code) == code
    assert timed(*engines, seconds=0.1)[0].void == (None if reason is None else reason.text)


def test_messages() -> None:
    """The text of a void row."""
    reason = incomparable_reason(FakeEngine(attentions=12, fused=12), FakeEngine(attentions=5, fused=4))
    assert str(reason) == (
        "the runtime fused 12 of 12 attentions of the dense graph and 4 of 5 of the compressed graph"
    )


MINIMUM_TURNS = 4


def median_times_of(*engines: FakeEngine, seconds: float = 1.0) -> tuple[list[float], FakeClock]:
    """Median seconds of engines on a clock that advances only with their calls."""
    clock = FakeClock(*engines)
    with timed_by(clock):
        return median_times(engines, {}, seconds), clock


def rounds_of(clock: FakeClock, engines: int, turns: int) -> list[FakeEngine]:
    """The engine of every round, in order; all rounds have the same number of calls."""
    calls = clock.calls[engines * WARM_UP_CALLS :]
    length, rest = divmod(len(calls), engines * turns)
    assert rest == 0
    rounds = [calls[start : start + length] for start in range(0, len(calls), length)]
    assert all(len(set(sample)) == 1 for sample in rounds)
    return [sample[0] for sample in rounds]


def test_each_engine_has_its_own_median() -> None:
    medians, _ = median_times_of(FakeEngine(3.0), FakeEngine(1.0), FakeEngine(20.0))
    assert medians == pytest.approx([3e-3, 1e-3, 20e-3])


def test_a_rare_slow_call_does_not_move_the_median() -> None:
    medians, _ = median_times_of(NoisyEngine(3.0, 1), NoisyEngine(2.0, 2), seconds=5.0)
    assert medians == pytest.approx([3e-3, 2e-3], rel=0.05)


def test_an_engine_against_itself_has_the_same_median() -> None:
    engine = FakeEngine(5.0)
    (first, second), _ = median_times_of(engine, engine)
    assert first == pytest.approx(second)


def test_engines_take_turns_and_every_second_turn_goes_backwards() -> None:
    first, second, third = FakeEngine(32.0), FakeEngine(28.0), FakeEngine(26.0)
    _, clock = median_times_of(first, second, third, seconds=0.0)
    forwards = [first, second, third]
    assert rounds_of(clock, 3, MINIMUM_TURNS) == 2 * [*forwards, *reversed(forwards)]


@pytest.mark.parametrize("milliseconds", [0.1, 30.0, 900.0])
def test_each_engine_is_timed_in_at_least_four_rounds(milliseconds: float) -> None:
    first, second = FakeEngine(milliseconds), FakeEngine(milliseconds)
    _, clock = median_times_of(first, second, seconds=0.0)
    rounds = rounds_of(clock, 2, MINIMUM_TURNS)
    assert rounds.count(first) == rounds.count(second) == MINIMUM_TURNS


def test_more_seconds_give_more_rounds() -> None:
    engines = FakeEngine(30.0), FakeEngine(30.0)
    _, short = median_times_of(*engines, seconds=0.0)
    _, long = median_times_of(*engines, seconds=5.0)
    assert len(long.calls) > 2 * len(short.calls)
    assert 5.0 < long.now < 2 * 5.0


@pytest.mark.parametrize("seconds", [0.2, 0.5, 3.0])
def test_timing_takes_about_the_seconds_that_it_may(seconds: float) -> None:
    _, clock = median_times_of(FakeEngine(1.0), FakeEngine(2.0), seconds=seconds)
    assert seconds / 2 < clock.now < 1.5 * seconds


def test_every_engine_is_called_before_timing_begins() -> None:
    first, second = FakeEngine(1.0), FakeEngine(2.0)
    _, clock = median_times_of(first, second, seconds=0.0)
    assert clock.calls[: 2 * WARM_UP_CALLS] == WARM_UP_CALLS * [first] + WARM_UP_CALLS * [second]


def test_each_round_waits_for_the_threads_of_the_other_engine() -> None:
    engines = FakeEngine(30.0), FakeEngine(30.0)
    clock = FakeClock(*engines)
    waits: list[int] = []
    with timed_by(clock, lambda: waits.append(len(clock.calls))):
        median_times(engines, {}, 0.0)
    first = 2 * WARM_UP_CALLS
    length = (len(clock.calls) - first) // (2 * MINIMUM_TURNS)
    assert waits == [first + number * length for number in range(2 * MINIMUM_TURNS)]


class DisturbedEngine(FakeEngine):
    """An engine that is slowed down in the first seconds of every ten."""

    def __init__(self, milliseconds: float, disturbed: float) -> None:
        super().__init__(milliseconds)
        self.undisturbed, self.disturbed = milliseconds, disturbed

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Advance the clock."""
        assert self.clock is not None
        self.milliseconds = self.undisturbed * (2.0 if self.clock.now % 10 < self.disturbed else 1.0)
        return super().run(feeds)


def turns_of(function: Callable[..., Any], *engines: FakeEngine, seconds: float = 20.0) -> Any:
    clock = FakeClock(*engines)
    with timed_by(clock):
        return function(engines, {}, seconds)


@given(st.floats(0.0, 10.0), st.floats(0.5, 40.0))
def test_the_ratio_of_two_engines_is_that_of_an_undisturbed_machine(disturbed: float, milliseconds: float) -> None:
    control, engine = turns_of(paired_times, DisturbedEngine(10.0, disturbed), DisturbedEngine(milliseconds, disturbed))
    assert engine / control == pytest.approx(milliseconds / 10.0)


def test_ratios_have_the_standard_error_of_their_repetitions() -> None:
    measured = [
        turns_of(paired_ratios, NoisyEngine(4.0, seed), NoisyEngine(2.0, seed + 100), seconds=2.0) for seed in range(60)
    ]
    ratios, errors = np.array(measured)[:, 0].T
    assert np.mean(ratios) == pytest.approx(0.5, rel=0.02)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(ratios), rel=0.3)
    assert turns_of(paired_ratios, FakeEngine(40.0), FakeEngine(20.0)) == [(pytest.approx(0.5), pytest.approx(0.0))]


def test_the_control_has_its_median_time() -> None:
    engines = FakeEngine(3.0), FakeEngine(1.0), FakeEngine(20.0)
    assert turns_of(paired_times, *engines) == pytest.approx([3e-3, 1e-3, 20e-3])
    assert turns_of(paired_times, *engines) == pytest.approx(turns_of(median_times, *engines))
