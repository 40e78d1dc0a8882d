"""Times of a model and its baseline in rounds, and the slowdown computed from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compressor.latency.verdict import Slowdown
from compressor.measure.timing import ratio_interval

CONFIDENCE = 0.95
_RESAMPLES = 2000


class RoundTimes:
    """Milliseconds of calls, one array `[call]` per round.

    Args:
        saved: rounds of a baseline that was measured earlier; None where both sides are measured in turn.

    Attributes:
        model: the rounds of the model.
        baseline: the rounds of the baseline.
        interleaved: whether rounds of model and baseline alternate.
    """

    def __init__(self, saved: Sequence[np.ndarray] | None = None) -> None:
        self.model: list[np.ndarray] = []
        self.baseline: list[np.ndarray] = list(saved or ())
        self.interleaved = saved is None

    def add(self, pair: np.ndarray) -> None:
        """Add two rounds `[2, call]`: of model and baseline, or both of the model where the baseline is saved."""
        self.model.append(pair[0])
        (self.baseline if self.interleaved else self.model).append(pair[1])

    def slowdown(self, limit: float, seed: int) -> Slowdown | None:
        """The slowdown over all rounds; None before the first.

        Args:
            limit: maximum slowdown.
            seed: seed of the bootstrap.
        """
        if not self.model:
            return None
        model, baseline = np.stack(self.model), np.stack(self.baseline)
        if self.interleaved:
            low, high = ratio_interval(np.stack([model, baseline]), seed, CONFIDENCE)
        else:
            low, high = _unpaired_interval(model, baseline, seed)
        ratio = float(np.median(model) / np.median(baseline))
        (baseline_p50, baseline_p99), (model_p50, model_p99) = (
            np.quantile(side, [0.5, 0.99]) for side in (baseline, model)
        )
        return Slowdown(
            baseline_p50=baseline_p50,
            model_p50=model_p50,
            baseline_p99=baseline_p99,
            model_p99=model_p99,
            slowdown=ratio - 1,
            low=min(low, ratio) - 1,
            high=max(high, ratio) - 1,
            confidence=CONFIDENCE,
            limit=limit,
            rounds=len(model),
            calls=model.shape[1],
            interleaved=self.interleaved,
        )


def _unpaired_interval(model: np.ndarray, baseline: np.ndarray, seed: int) -> tuple[float, float]:
    """Bootstrap bounds of the ratio of medians, for sides that were measured at different times."""
    rng = np.random.default_rng(seed)
    # One draw at a time: all of them together take gigabytes where rounds are many and long.
    medians = [
        np.array([np.median(side[draw]) for draw in rng.integers(0, len(side), (_RESAMPLES, len(side)))])
        for side in (model, baseline)
    ]
    low, high = np.quantile(medians[0] / medians[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
