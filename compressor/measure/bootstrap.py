"""The difference of a metric between two models, with a bootstrap interval over the examples; and whether it can show
a loss."""

from __future__ import annotations

import math
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
    dense: np.ndarray,
    compressed: np.ndarray,
    metric: Callable[[np.ndarray], float],
    seed: int,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Percentile bootstrap of a difference of metrics; each draw takes the same examples from both models.

    Args:
        dense: metric sums of the dense model, `[examples, ...]`.
        compressed: metric sums of the compressed model for the same examples in the same order.
        metric: computes the metric from the metric sums of any examples.

    Raises:
        ValueError: the two models have different numbers of examples, or none.
    """
    examples = len(dense)
    if examples != len(compressed) or not examples:
        text = f"{examples} examples against {len(compressed)}: both models must have scored the same, and at least one"
        raise ValueError(text)
    rng = np.random.default_rng(seed)
    differences = np.empty(resamples)
    for index in range(resamples):
        draw = rng.integers(0, examples, examples)
        differences[index] = metric(compressed[draw]) - metric(dense[draw])
    # A draw may leave the metric undefined (one class only); it is ignored.
    low, high = np.nanquantile(differences, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(metric(compressed) - metric(dense), float(low), float(high))


def uninformed_text(metric: str, dense: float, constant: float | None, split: str) -> str | None:
    """Why a metric can show no loss: the whole model is no better than one answer for all rows; None: it is better.

    Args:
        constant: that of an answer that is the same for every row; None: there is none.
    """
    if constant is None or dense > constant or math.isnan(dense) or math.isnan(constant):
        return None
    return (
        f"{metric}: the whole model scores {dense:.4g} on the {split} rows, no better than the same answer for every"
        f" row ({constant:.4g}); check that these rows are of the task that the model learned, and that their labels"
        " have the order of its classes"
    )
