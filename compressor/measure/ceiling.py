"""How much a classifier loses at most where its answers change, by the probabilities of the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from compressor.measure.divergence import log_softmax

_TEMPERATURES = np.geomspace(0.05, 20, 121)
_DRAWN_LABELS, _LEAST_DRAWS = 50_000, 4
"""Labels that are drawn together, and least number of draws for each row: with more rows fewer suffice."""
_QUANTILE = 1.645
"""Quantile of the standard normal distribution at 95%."""
Statistics = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Sufficient statistics of a metric `[rows, k]`, of logits `[rows, classes]` and labels `[rows]`."""


@dataclass(frozen=True)
class LossCeiling:
    """An upper bound of the loss of a changed classifier, which labels of few rows tell only to about a point.

    Where a changed model answers as before, it loses nothing. Where its answer changes, either answer may be right,
    with the probabilities that the whole model gives them. A change that knew more about the label would lose less.
    The probabilities are calibrated on labels by a temperature (Guo et al. 2017, "On calibration of modern neural
    networks", section 4.2).

    Attributes:
        whole: logits of the whole model, `[rows, classes]`.
        chances: its calibrated probabilities, `[rows, classes]`.
        labels: drawn from these, `[draws, rows]`.
        statistics: sufficient statistics of the metric.
        score: the metric of sufficient statistics.
    """

    whole: np.ndarray
    chances: np.ndarray
    labels: np.ndarray
    statistics: Statistics
    score: Callable[[np.ndarray], float]

    @classmethod
    def of(
        cls,
        whole: np.ndarray,
        labels: np.ndarray,
        statistics: Statistics,
        score: Callable[[np.ndarray], float],
        seed: int,
    ) -> LossCeiling:
        """The ceiling for a model with some logits `[rows, classes]` on rows with labels `[rows]`."""
        chances = np.exp(log_softmax(whole / _temperature(whole, labels)))
        sums, last = chances.cumsum(-1), whole.shape[-1] - 1
        rng, draws = np.random.default_rng(seed), max(_LEAST_DRAWS, math.ceil(_DRAWN_LABELS / len(whole)))
        drawn = [np.minimum((sums < rng.random((len(whole), 1))).sum(-1), last) for _ in range(draws)]
        return cls(whole, chances, np.stack(drawn), statistics, score)

    def loss(self, logits: np.ndarray, *, higher_is_better: bool) -> float:
        """What a model with other logits `[rows, classes]` loses at most, in the unit of the metric; at least zero.

        The loss is raised to the upper limit of its interval for the rows, so that few changes on few rows are not
        taken for none. What the rows lose is a sum over the answers that happen to change. It varies as a number of
        equal losses from a Poisson distribution does that has the same mean and variance.
        """
        rows, before, after = np.arange(len(self.whole)), self.whole.argmax(-1), logits.argmax(-1)
        losses = self.chances[rows, before] - self.chances[rows, after]
        if not losses.any():
            return _upper_count(0) / len(rows)
        sign = 1 if higher_is_better else -1
        drawn = np.array([
            sign * (self.score(self.statistics(self.whole, labels)) - self.score(self.statistics(logits, labels)))
            for labels in self.labels
        ])  # fmt: skip
        # The loss of accuracy is known without draws, and corrects the mean of few (a control variate).
        accuracy = ((self.labels == before).astype(float) - (self.labels == after)).mean(1)
        slope = np.cov(drawn, accuracy)[0, 1] / max(float(accuracy.var(ddof=1)), 1e-12)
        expected = max(0.0, float(drawn.mean() + slope * (losses.mean() - accuracy.mean())))
        equal = losses.sum() ** 2 / np.square(losses).sum()
        return expected * _upper_count(equal) / equal


def _temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature at which the labels are most likely."""
    rows = np.arange(len(labels))
    losses = [-log_softmax(logits / temperature)[rows, labels].mean() for temperature in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def _upper_count(count: float) -> float:
    """The upper limit, with a confidence of 95%, of the mean of a Poisson distribution from which a count is.

    By the approximation of Wilson and Hilferty (1931) of the quantile of chi-squared; for a count of 0 it is 3.0.
    """
    part = 1 / (9 * (count + 1))
    return float((count + 1) * (1 - part + _QUANTILE * part**0.5) ** 3)
