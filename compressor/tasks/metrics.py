"""Metrics over the pairs that the tasks keep of each example, so that a resample of the rows is scored exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

Metric = Callable[[np.ndarray, np.ndarray], float]


def f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    """F1 of class 1 where the classes are 0 and 1, the mean over classes else; 0 where it is undefined."""
    binary = max(predicted.max(initial=0), labels.max(initial=0)) <= 1
    return float(f1_score(labels, predicted, average="binary" if binary else "macro", zero_division=0.0))


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Share of rows whose class was predicted."""
    return float(accuracy_score(labels, predicted))


def matthews(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Matthews' correlation; 0 where either side is of one class, as it is undefined there."""
    return 0.0 if _constant(predicted) or _constant(labels) else float(matthews_corrcoef(labels, predicted))


def spearman(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Spearman's rank correlation; 0 where either side is constant, as it is undefined there."""
    return 0.0 if _constant(predicted) or _constant(labels) else float(spearmanr(predicted, labels).statistic)


def pearson(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Pearson's correlation; 0 where either side is constant, as it is undefined there."""
    return 0.0 if _constant(predicted) or _constant(labels) else float(pearsonr(predicted, labels).statistic)


def perplexity(losses: np.ndarray, tokens: np.ndarray) -> float:
    """`exp` of the mean loss a token, from each block's summed loss in nats and its number of predicted tokens."""
    mean = losses.sum() / tokens.sum()
    return math.exp(mean) if mean < 700 else math.inf


def _constant(values: np.ndarray) -> bool:
    return bool(values.size == 0 or (values == values[0]).all())
