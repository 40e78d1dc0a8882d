"""Median times of several engines: each has its own, rounds are taken in turn, and every second turn goes backwards."""

from __future__ import annotations

import pytest

from compressor.measure import median_times
from compressor.measure.timing import WARM_UP_CALLS
from tests.targets.engines import FakeClock, FakeEngine, NoisyEngine

MINIMUM_TURNS = 4


def do_not_wait() -> None:
    pass


def timed(*engines: FakeEngine, seconds: float = 1.0) -> tuple[list[float], FakeClock]:
    """Median seconds of engines on a clock that advances only with their calls."""
    clock = FakeClock(*engines)
    return median_times(engines, {}, seconds, wait=do_not_wait, clock=clock.read), clock


def rounds_of(clock: FakeClock, engines: int, turns: int) -> list[FakeEngine]:
    """The engine of every round, in order; all rounds have the same number of calls."""
    calls = clock.calls[engines * WARM_UP_CALLS :]
    length, rest = divmod(len(calls), engines * turns)
    assert rest == 0
    rounds = [calls[start : start + length] for start in range(0, len(calls), length)]
    assert all(len(set(sample)) == 1 for sample in rounds)
    return [sample[0] for sample in rounds]


def test_each_engine_has_its_own_median() -> None:
    medians, _ = timed(FakeEngine(3.0), FakeEngine(1.0), FakeEngine(20.0))
    assert medians == pytest.approx([3e-3, 1e-3, 20e-3])


def test_a_rare_slow_call_does_not_move_the_median() -> None:
    medians, _ = timed(NoisyEngine(3.0, 1), NoisyEngine(2.0, 2), seconds=5.0)
    assert medians == pytest.approx([3e-3, 2e-3], rel=0.05)


def test_an_engine_against_itself_is_as_fast() -> None:
    engine = FakeEngine(5.0)
    (first, second), _ = timed(engine, engine)
    assert first == pytest.approx(second)


def test_engines_take_turns_and_every_second_turn_goes_backwards() -> None:
    first, second, third = FakeEngine(32.0), FakeEngine(28.0), FakeEngine(26.0)
    _, clock = timed(first, second, third, seconds=0.0)
    forwards = [first, second, third]
    assert rounds_of(clock, 3, MINIMUM_TURNS) == 2 * [*forwards, *reversed(forwards)]


@pytest.mark.parametrize("milliseconds", [0.1, 30.0, 900.0])
def test_each_engine_is_timed_in_at_least_four_rounds(milliseconds: float) -> None:
    first, second = FakeEngine(milliseconds), FakeEngine(milliseconds)
    _, clock = timed(first, second, seconds=0.0)
    rounds = rounds_of(clock, 2, MINIMUM_TURNS)
    assert rounds.count(first) == rounds.count(second) == MINIMUM_TURNS


def test_more_seconds_give_more_rounds() -> None:
    engines = FakeEngine(30.0), FakeEngine(30.0)
    _, short = timed(*engines, seconds=0.0)
    _, long = timed(*engines, seconds=5.0)
    assert len(long.calls) > 2 * len(short.calls)
    assert 5.0 < long.now < 2 * 5.0


def test_every_engine_is_called_before_timing_begins() -> None:
    first, second = FakeEngine(1.0), FakeEngine(2.0)
    _, clock = timed(first, second, seconds=0.0)
    assert clock.calls[: 2 * WARM_UP_CALLS] == WARM_UP_CALLS * [first] + WARM_UP_CALLS * [second]


def test_each_round_waits_for_the_threads_of_the_other_engine() -> None:
    engines = FakeEngine(30.0), FakeEngine(30.0)
    clock = FakeClock(*engines)
    waits: list[int] = []
    median_times(engines, {}, 0.0, wait=lambda: waits.append(len(clock.calls)), clock=clock.read)
    first = 2 * WARM_UP_CALLS
    length = (len(clock.calls) - first) // (2 * MINIMUM_TURNS)
    assert waits == [first + number * length for number in range(2 * MINIMUM_TURNS)]
