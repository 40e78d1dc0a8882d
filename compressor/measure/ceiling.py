"""How much accuracy a classifier loses at most where its answers change, by the probabilities of the whole model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compressor.measure.divergence import log_softmax

_TEMPERATURES = np.geomspace(0.05, 20, 61)
_CALIBRATION_ROWS = 2000
_FEWEST_ROWS = 100
"""Rows below which a temperature says too little."""
_QUANTILE = 1.645
"""Quantile of the standard normal distribution at 95%."""


@dataclass(frozen=True)
class LossCeiling:
    """An upper bound of the accuracy that a changed classifier loses; labels of few rows tell it only to about a point.

    Where a changed model answers as before, it loses nothing. Where its answer changes, either answer may be right,
    with the probabilities that the whole model gives them. A change that knew more about the label would lose less.
    The probabilities are calibrated on labels by a temperature (Guo et al. 2017, "On calibration of modern neural
    networks", section 4.2).

    Attributes:
        chances: calibrated probabilities of the whole model, `[rows, classes]`.
    """

    chances: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray, labels: np.ndarray, *, are_answers: bool = False) -> LossCeiling | None:
        """The ceiling for a model with some logits `[rows, classes]` on rows with labels `[rows]`; None: few rows.

        Args:
            are_answers: whether the labels are the answers of this model, so that each changed answer is wrong.
        """
        if are_answers:
            return cls(np.eye(logits.shape[1], dtype=np.float32)[logits.argmax(-1)])
        if len(logits) < _FEWEST_ROWS:
            return None
        drawn = np.linspace(0, len(logits) - 1, min(len(logits), _CALIBRATION_ROWS)).astype(int)
        return cls(np.exp(log_softmax(logits / _temperature(logits[drawn], labels[drawn]))))

    def loss(self, answers: np.ndarray) -> float:
        """The accuracy that a model with other answers `[rows]` loses at most, as a share of the rows.

        It is the upper limit of the interval for the rows, so that few changes on few rows are not taken for none. What
        the rows lose is a sum over the answers that happen to change. It varies as a number of equal losses from a
        Poisson distribution does that has the same mean and variance. Changes that would lose everything may be as many
        as do not show.
        """
        rows = np.arange(len(self.chances))
        losses = self.chances.max(-1) - self.chances[rows, answers]
        total, unseen = float(losses.sum()), _upper_count(0)
        equal = total**2 / float(np.square(losses).sum()) if total else 0.0
        return max(unseen, total * _upper_count(equal) / equal if equal else 0.0) / len(rows)


def _temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    rows = np.arange(len(labels))
    losses = [-log_softmax(logits / temperature)[rows, labels].mean() for temperature in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def _upper_count(count: float) -> float:
    """The upper limit, with a confidence of 95%, of the mean of a Poisson distribution from which a count is.

    By the approximation of Wilson and Hilferty (1931) of the quantile of chi-squared; for a count of 0 it is 3.0.
    """
    part = 1 / (9 * (count + 1))
    return float((count + 1) * (1 - part + _QUANTILE * part**0.5) ** 3)
