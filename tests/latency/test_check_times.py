"""Slowdowns are distinguished from noise: every real one is reported, and no other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.latency.check import RoundTimes


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 10_000), st.floats(0.0, 0.05), st.booleans())
def test_a_slowdown_is_distinguished_from_noise(seed: int, drift: float, interleaved: bool) -> None:
    """Equal times are within the limit and twice the limit is not, even if both drift together."""
    rng = np.random.default_rng(seed)
    for factor, holds in ((1.0, True), (1.12, False)):
        noise = [
            np.exp(0.02 * rng.normal(size=(2, 20)) + (drift * number / 40 if interleaved else 0.0))
            for number in range(40)
        ]
        pairs = [np.array([[factor], [1.0]]) * factors for factors in noise]
        if interleaved:
            times = RoundTimes()
            for pair in pairs:
                times.add(pair)
        else:
            times = RoundTimes(saved=[pair[1] for pair in pairs])
            for first, second in zip(pairs[::2], pairs[1::2], strict=True):
                times.add(np.stack([first[0], second[0]]))
        slowdown = times.slowdown(0.05, seed)
        assert slowdown is not None
        assert slowdown.low <= slowdown.slowdown <= slowdown.high
        assert (slowdown.holds, slowdown.rounds, slowdown.calls) == (holds, 40, 20)
        assert slowdown.interleaved is interleaved


def test_quantiles_are_of_all_calls() -> None:
    times = RoundTimes()
    for _ in range(10):
        times.add(np.array([[2.0, 2.0, 4.0], [1.0, 1.0, 1.0]]))
    slowdown = times.slowdown(0.05, 0)
    assert slowdown is not None
    assert (slowdown.model_p50, slowdown.baseline_p50, slowdown.slowdown) == (2.0, 1.0, 1.0)
    assert slowdown.model_p99 == pytest.approx(4.0)


@pytest.mark.parametrize("saved", [None, [np.ones(3)]])
def test_nothing_is_compared_before_the_first_round(saved: list[np.ndarray] | None) -> None:
    assert RoundTimes(saved).slowdown(0.05, 0) is None
