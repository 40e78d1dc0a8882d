"""Metrics over the pairs that the tasks keep of each example, so that a resample of the rows is scored exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from sacrebleu.metrics import BLEU
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_SENTENCES = BLEU(effective_order=True)  # of a single sentence; the counts are those of any order

_OWN_UNIT = frozenset({"bits-per-character", "bleu", "loss", "perplexity"})
"""Metrics that are told as they are; the others are shares or correlations, told in points, hundredths."""

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
    mean = mean_loss(losses, tokens)
    return math.exp(mean) if mean < 700 else math.inf


def bits(losses: np.ndarray, tokens: np.ndarray) -> float:
    """The mean loss a token in bits: bits per character where tokens are characters."""
    return mean_loss(losses, tokens) / math.log(2)


def mean_loss(losses: np.ndarray, tokens: np.ndarray) -> float:
    """The mean loss a token, from each row's summed loss in nats and its number of tokens."""
    return float(losses.sum() / tokens.sum())


def bleu_counts(translation: str, reference: str) -> np.ndarray:
    """What BLEU needs of one row, `[10]`: both lengths, then matches and totals of the n-grams of 1 to 4 words."""
    found = _SENTENCES.sentence_score(translation, [reference])
    return np.asarray([found.sys_len, found.ref_len, *found.counts, *found.totals], dtype=np.float64)


def bleu(counts: np.ndarray) -> float:
    """Corpus BLEU, 0 to 100, of any rows of `bleu_counts` `[examples, 10]` (Papineni et al. 2002; sacrebleu's)."""
    translated, reference, *ngrams = counts.sum(axis=0).astype(np.int64).tolist()
    return float(BLEU.compute_bleu(ngrams[:4], ngrams[4:], translated, reference, smooth_method="exp").score)


def _constant(values: np.ndarray) -> bool:
    return bool(values.size == 0 or (values == values[0]).all())


def points(metric: str) -> float:
    """By how much a metric is multiplied to be told: 100 for a share, 1 for one with a unit of its own."""
    return 1.0 if metric in _OWN_UNIT else 100.0


def unit(metric: str) -> str:
    """The metric and its unit, for the head of a column."""
    return metric if metric in _OWN_UNIT else f"{metric}, %"
