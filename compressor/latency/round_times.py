"""Times of a model and its baseline, and what they say of a slowdown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compressor.latency.verdict import Slowdown
from compressor.measure.timing import ratio_interval

CONFIDENCE = 0.95
_RESAMPLES = 2000


class Times:
    """Milliseconds of calls, by block `[call]`."""

    def __init__(self) -> None:
        self.model: list[np.ndarray] = []
        self.baseline: list[np.ndarray] = []

    def add(self, pair: np.ndarray, interleaved: bool) -> None:
        self.model.append(pair[0])
        (self.baseline if interleaved else self.model).append(pair[1])

    def slowdown(self, before: Sequence[np.ndarray] | None, limit: float, seed: int) -> Slowdown | None:
        """Of what was measured; None where that is nothing.

        Args:
            before: the baseline's blocks where they were measured earlier.
            limit: largest slowdown allowed.
            seed: of the bootstrap.
        """
        if not self.model:
            return None
        model = np.stack(self.model)
        baseline = np.stack(self.baseline if before is None else list(before))
        if before is None:
            low, high = ratio_interval(np.stack([model, baseline]), seed, CONFIDENCE)
        else:
            low, high = _unpaired(model, baseline, seed)
        ratio = float(np.median(model) / np.median(baseline))
        (base50, base99), (model50, model99) = (np.quantile(side, [0.5, 0.99]) for side in (baseline, model))
        return Slowdown(
            baseline_p50=base50,
            model_p50=model50,
            baseline_p99=base99,
            model_p99=model99,
            slowdown=ratio - 1,
            low=min(low, ratio) - 1,
            high=max(high, ratio) - 1,
            confidence=CONFIDENCE,
            limit=limit,
            blocks=len(model),
            calls=model.shape[1],
            interleaved=before is None,
        )


def _unpaired(model: np.ndarray, baseline: np.ndarray, seed: int) -> tuple[float, float]:
    """Bounds of the ratio of medians of two sets of blocks that were measured at different times."""
    rng = np.random.default_rng(seed)
    medians = [
        np.median(side[rng.integers(0, len(side), (_RESAMPLES, len(side)))], axis=(1, 2)) for side in (model, baseline)
    ]
    low, high = np.quantile(medians[0] / medians[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
