"""Engines are timed again while the control is slower than before, and a lasting slowdown is accepted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compressor.measure.quiet_timer import EXCESS, PATIENCE_SECONDS, QuietTimer

CONTROL: Any = SimpleNamespace(path=Path("control"))
ATTEMPTS = 5


class Clock:
    """Returns the next times of the control, and times of an engine that is slowed down twice as much."""

    def __init__(self, times: Iterable[float]) -> None:
        self.remaining = iter(times)
        self.attempts = 0

    def __call__(self, *args: Any) -> list[float]:
        self.attempts += 1
        control = next(self.remaining)
        return [control, 2 * control - 1]


def medians(timer: QuietTimer, size: int = 1) -> list[float]:
    return timer.medians([CONTROL, CONTROL], {}, PATIENCE_SECONDS / ATTEMPTS, size)


def test_engines_are_timed_once_while_the_control_is_as_fast() -> None:
    clock = Clock([1.0, 0.98, 0.98 * EXCESS])
    timer = QuietTimer(clock)
    assert [medians(timer)[0] for _ in range(3)] == [1.0, 0.98, 0.98 * EXCESS]
    assert clock.attempts == 3


@pytest.mark.parametrize("disturbed", range(1, ATTEMPTS))
def test_a_disturbed_attempt_is_repeated(disturbed: int) -> None:
    clock = Clock([1.0, *disturbed * [1.2], 1.01])
    timer = QuietTimer(clock)
    medians(timer)
    assert medians(timer)[0] == 1.01
    assert clock.attempts == 2 + disturbed


def test_a_lasting_slowdown_becomes_the_speed_of_the_machine() -> None:
    clock = Clock([1.0, *ATTEMPTS * [1.5], 1.5])
    timer = QuietTimer(clock)
    medians(timer)
    assert medians(timer) == [1.5, 2.0]
    assert medians(timer) == [1.5, 2.0]
    assert clock.attempts == 1 + ATTEMPTS + 1


def test_sizes_have_controls_of_their_own() -> None:
    clock = Clock([1.0, 9.0])
    timer = QuietTimer(clock)
    assert medians(timer, 1)[0] == 1.0
    assert medians(timer, 8)[0] == 9.0
    assert clock.attempts == 2
