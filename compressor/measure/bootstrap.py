"""By how much two models differ on a metric, and how sure that is: a bootstrap over rows that both have answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """Compressed minus dense in the metric's own unit, and the bounds of the bootstrap interval."""

    difference: float
    low: float
    high: float


def paired_interval(
    statistics_dense: np.ndarray,
    statistics_compressed: np.ndarray,
    metric: Callable[[np.ndarray], float],
    seed: int,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Percentile bootstrap of a difference of metrics; each draw takes the same rows from both sides.

    Args:
        statistics_dense, statistics_compressed: what the metric is computed from, one row an example
            `[examples, ...]`, the same examples in the same order.
        metric: the metric over any rows of them.
        seed: of the draws; the same seed gives the same interval.
        confidence: share of the draws inside the interval.
        resamples: number of draws.

    Raises:
        ValueError: the two sides have different examples, or none.
    """
    if len(statistics_dense) != len(statistics_compressed) or not len(statistics_dense):
        raise ValueError(
            f"{len(statistics_dense)} rows against {len(statistics_compressed)}; both sides must have answered the same"
        )
    rng = np.random.default_rng(seed)
    rows = len(statistics_dense)
    draws = np.empty(resamples)
    for draw in range(resamples):
        chosen = rng.integers(0, rows, rows)
        draws[draw] = metric(statistics_compressed[chosen]) - metric(statistics_dense[chosen])
    # A draw may leave the metric undefined (one class only): it says nothing about the difference.
    low, high = np.nanquantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(metric(statistics_compressed) - metric(statistics_dense), float(low), float(high))
