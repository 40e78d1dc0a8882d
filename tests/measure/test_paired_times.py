"""Times by ratios of neighbouring rounds do not depend on how long the machine is disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.measure import median_times, paired_ratios, paired_times
from compressor.targets.base import Feeds
from tests.targets.engines import FakeClock, FakeEngine, NoisyEngine


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


def timed(function: Callable[..., Any], *engines: FakeEngine, seconds: float = 20.0) -> Any:
    clock = FakeClock(*engines)
    return function(engines, {}, seconds, wait=lambda: None, clock=clock.read)


@given(st.floats(0.0, 10.0), st.floats(0.5, 40.0))
def test_the_ratio_of_two_engines_is_that_of_an_undisturbed_machine(disturbed: float, milliseconds: float) -> None:
    control, engine = timed(paired_times, DisturbedEngine(10.0, disturbed), DisturbedEngine(milliseconds, disturbed))
    assert engine / control == pytest.approx(milliseconds / 10.0)


def test_ratios_have_the_standard_error_of_their_repetitions() -> None:
    measured = [
        timed(paired_ratios, NoisyEngine(4.0, seed), NoisyEngine(2.0, seed + 100), seconds=2.0) for seed in range(60)
    ]
    ratios, errors = np.array(measured)[:, 0].T
    assert np.mean(ratios) == pytest.approx(0.5, rel=0.02)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(ratios), rel=0.3)
    assert timed(paired_ratios, FakeEngine(40.0), FakeEngine(20.0)) == [(pytest.approx(0.5), pytest.approx(0.0))]


def test_the_control_has_its_median_time() -> None:
    engines = FakeEngine(3.0), FakeEngine(1.0), FakeEngine(20.0)
    assert timed(paired_times, *engines) == pytest.approx([3e-3, 1e-3, 20e-3])
    assert timed(paired_times, *engines) == pytest.approx(timed(median_times, *engines))
