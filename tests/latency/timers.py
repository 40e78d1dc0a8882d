"""Timers for checks, which draw times and do not measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from compressor.latency.check import Timer


def drawn_times(model: float, baseline: float, spread: float = 0.02, rounds: int = 30) -> Timer:
    """A timer that makes one call of each side per round and draws ten times around the medians, in milliseconds.

    Args:
        model, baseline: the medians.
        spread: standard deviation of the logarithm of a time.
        rounds: number of pairs of rounds.
    """
    rng = np.random.default_rng(0)

    def draw(
        first: Callable[[], object], second: Callable[[], object], seconds: float, /, **_: Any
    ) -> Iterator[np.ndarray]:
        for _round in range(rounds):
            first()
            second()
            yield 1e-3 * np.array([[model], [baseline]]) * np.exp(spread * rng.normal(size=(2, 10)))

    return draw


EQUAL_TIMES = drawn_times(1.0, 1.0)
