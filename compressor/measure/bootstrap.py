"""The difference of a metric between two models, with a bootstrap interval over the examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A difference with its bootstrap interval, in the metric's own unit.

    Attributes:
        difference: compressed minus dense.
        low: lower bound.
        high: upper bound.
    """

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
    """Percentile bootstrap of a difference of metrics; each draw takes the same examples from both models.

    Args:
        statistics_dense: statistics of the dense model's outputs, `[examples, ...]`.
        statistics_compressed: statistics of the compressed model's outputs for the same examples in the same order.
        metric: computes the metric from the statistics of any examples.
        seed: seed of the draws; the same seed gives the same interval.
        confidence: coverage of the interval.
        resamples: number of draws.

    Raises:
        ValueError: the two models have different numbers of examples, or none.
    """
    if len(statistics_dense) != len(statistics_compressed) or not len(statistics_dense):
        raise ValueError(
            f"{len(statistics_dense)} examples against {len(statistics_compressed)}: both models must have scored the"
            " same, and at least one"
        )
    rng = np.random.default_rng(seed)
    examples = len(statistics_dense)
    differences = np.empty(resamples)
    for index in range(resamples):
        draw = rng.integers(0, examples, examples)
        differences[index] = metric(statistics_compressed[draw]) - metric(statistics_dense[draw])
    # A draw may leave the metric undefined (one class only); it is ignored.
    low, high = np.nanquantile(differences, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(metric(statistics_compressed) - metric(statistics_dense), float(low), float(high))
