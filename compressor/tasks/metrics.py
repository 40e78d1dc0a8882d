"""Metrics: their names and units, and their computation from the statistics of examples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from compressor.answers import IGNORED
from compressor.errors import ErrorCode, UsageError
from compressor.results import MetricUnit
from compressor.silence_libraries import one_line

_LOSS_TOKENS = 64
"""Tokens whose losses are computed at once, so that their exponentials stay in the cache."""


@dataclass(frozen=True)
class Metric:
    """A number that is computed from sufficient statistics of examples, so that any resample has an exact score.

    Attributes:
        name: the value of `--metric`, e.g. `accuracy`.
        compute: computes the value from statistics `[examples, k]` float64.
        unit: unit in which values are shown.
        higher_is_better: False for a loss.
        maximum: the largest possible value, e.g. 1 for a share or a correlation.
        point: a loss that is as large as a point of accuracy; None: a hundredth of `maximum`, or of the value of the
            whole model if `maximum` is infinite.
    """

    name: str
    compute: Callable[[np.ndarray], float]
    unit: MetricUnit = MetricUnit.RAW
    higher_is_better: bool = True
    maximum: float = math.inf
    point: float | None = None

    @property
    def heading(self) -> str:
        """The name with the unit, for the heading of a column: `accuracy, %`."""
        return f"{self.name}, %" if self.unit is MetricUnit.POINTS else self.name

    def point_of(self, whole: Callable[[], float]) -> float:
        """The loss that is allowed where none is set, such as a point of accuracy, 1 BLEU, or 1% of a perplexity.

        `whole` computes the value of the whole model; it is called only if the loss depends on it.
        """
        if self.point is not None:
            return self.point
        return (self.maximum if math.isfinite(self.maximum) else abs(whole())) / 100

    def value(self, statistics: np.ndarray) -> float:
        """The value for statistics `[examples, k]`.

        Raises:
            UsageError: `compute` of a custom task does not return a number.
        """
        try:
            return float(self.compute(statistics))
        except (TypeError, ValueError) as error:
            path = f"{self.compute.__module__}:{getattr(self.compute, '__qualname__', self.name)}"
            raise UsageError(
                f"--task {path}: the metric {self.name} is not a number ({one_line(error)}); return a number",
                code=ErrorCode.TASK_FAILED,
                field="task",
                value=path,
            ) from error


def token_losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The loss in nats of each token, `[tokens]` float64, from logits `[tokens, vocabulary]`; zero for targets of -100.

    Exponentials are computed in float32, and summed in float64.
    """
    losses = np.zeros(len(targets))
    for start in range(0, len(targets), _LOSS_TOKENS):
        part = slice(start, start + _LOSS_TOKENS)
        is_scored = targets[part] != IGNORED
        scores, tokens = logits[part][is_scored].astype(np.float32, copy=False), targets[part][is_scored]
        largest = scores.max(-1, keepdims=True)
        with np.errstate(invalid="ignore"):  # logits that are not finite have a loss that is not finite
            sums = np.exp(scores - largest).sum(-1, dtype=np.float64)
            margins = np.take_along_axis(scores, tokens[:, None], -1).astype(np.float64) - largest
        losses[part][is_scored] = np.log(sums) - margins[:, 0]
    return losses


def summed_losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Summed loss in nats and number of predicted tokens of each example, `[batch, 2]` float64.

    Logits are `[batch, position, vocabulary]`; targets `[batch, position]` are the tokens that positions predict, or
    -100.
    """
    sums = [token_losses(scores, row).sum() for scores, row in zip(logits, targets, strict=True)]
    return np.stack([np.array(sums), (targets != IGNORED).sum(1)], axis=-1, dtype=np.float64)


def column_mean(column: int, statistics: np.ndarray) -> float:
    """The mean of a column of statistics `[examples, k]`; zero without examples."""
    return float(statistics[:, column].mean()) if len(statistics) else 0.0


def accuracy(statistics: np.ndarray) -> float:
    """Share of correct classes, from predicted and true class of each example, `[examples, 2]`."""
    # A bootstrap computes it thousands of times, and functions of libraries spend most of their time on validation.
    predicted, labels = statistics.astype(np.int64).T
    return float((predicted == labels).mean())


def token_accuracy(statistics: np.ndarray) -> float:
    """Share of correct tokens or words, from the numbers of correct ones and of all, `[examples, 2]`."""
    predicted, tokens = statistics.sum(axis=0)
    return float(predicted / tokens)


def f1(statistics: np.ndarray) -> float:
    """F1 of class 1, from predicted and true class of each example, `[examples, 2]`; 0 if it is undefined."""
    return set_micro_f1(statistics == 1)


def macro_f1(statistics: np.ndarray) -> float:
    """Mean F1 over the classes that examples have, from predicted and true class of each example, `[examples, 2]`.

    A class that is only predicted does not count with F1 zero: the mean would be over other classes for each model.
    """
    correct, predicted, labels = _class_counts(statistics)
    return _mean_of_present(2 * correct / np.maximum(predicted + labels, 1), labels)


def _class_counts(statistics: np.ndarray) -> np.ndarray:
    """Numbers of right answers, of answers and of labels of each class, `[3, classes]`, from `[examples, 2]`."""
    classes, numbers = np.unique(statistics, return_inverse=True)
    predicted, labels = numbers.reshape(-1, 2).T
    columns = predicted[predicted == labels], predicted, labels
    return np.stack([np.bincount(column, minlength=len(classes)) for column in columns])


def set_micro_f1(statistics: np.ndarray) -> float:
    """F1 over all classes, from predicted and true classes of each example, `[examples, 2 classes]`."""
    predicted, labels = np.split(statistics, 2, axis=1)
    total = predicted.sum() + labels.sum()
    return float(2 * (predicted * labels).sum() / total) if total else 0.0


def set_macro_f1(statistics: np.ndarray) -> float:
    """Mean F1 over the classes that examples have, from predicted and true classes, `[examples, 2 classes]`."""
    predicted, labels = np.split(statistics, 2, axis=1)
    positives = labels.sum(0)
    return _mean_of_present(2 * (predicted * labels).sum(0) / np.maximum(predicted.sum(0) + positives, 1), positives)


def mean_average_precision(statistics: np.ndarray) -> float:
    """Mean average precision over classes that examples have, from logits and true classes, `[examples, 2 classes]`.

    The average precision of a class is the sum of (recall_n - recall_n-1) precision_n over its distinct logits, as in
    scikit-learn.
    """
    logits, labels = np.split(statistics, 2, axis=1)
    order = np.argsort(-logits, axis=0, kind="stable")
    logits, labels = (np.take_along_axis(values, order, 0) for values in (logits, labels))
    ranks = np.arange(len(labels))[:, None]
    is_last = np.concatenate([logits[1:] != logits[:-1], np.ones_like(logits[:1], bool)])
    # Equal logits have the rank of the last of them.
    ends = np.minimum.accumulate(np.where(is_last, ranks, len(labels))[::-1], axis=0)[::-1]
    precisions = np.take_along_axis(labels.cumsum(0) / (ranks + 1), ends, 0)
    positives = labels.sum(0)
    return _mean_of_present((labels * precisions).sum(0) / np.maximum(positives, 1), positives)


def _mean_of_present(values: np.ndarray, counts: np.ndarray) -> float:
    """The mean of the values `[classes]` of classes that examples have; zero if they have none."""
    return float(values[counts > 0].mean()) if counts.any() else 0.0


def matthews(statistics: np.ndarray) -> float:
    """Matthews correlation of predicted and true class of each example, `[examples, 2]`; 0 if it is undefined."""
    if _has_constant(statistics):
        return 0.0
    correct, predicted, labels = _class_counts(statistics).astype(np.float64)
    count = len(statistics)
    variances = (count**2 - predicted @ predicted) * (count**2 - labels @ labels)
    return float((correct.sum() * count - labels @ predicted) / np.sqrt(variances))


def spearman(statistics: np.ndarray) -> float:
    """Spearman's correlation of predicted and true number of each example, `[examples, 2]`; 0 if it is undefined."""
    if not np.isfinite(statistics).all():
        return float("nan")  # which have no rank
    return pearson(np.apply_along_axis(_ranks, 0, statistics)) if len(statistics) else 0.0


def pearson(statistics: np.ndarray) -> float:
    """Pearson's correlation of predicted and true number of each example, `[examples, 2]`; 0 if it is undefined."""
    return 0.0 if _has_constant(statistics) else float(np.corrcoef(statistics.T)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value, from 1; equal values have the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (counts.cumsum() - (counts - 1) / 2)[places]
    return ranks


def mean_loss(statistics: np.ndarray) -> float:
    """Mean loss per token, from the summed loss in nats and the number of tokens of each example, `[examples, 2]`."""
    return float(statistics[:, 0].sum() / statistics[:, 1].sum())


def perplexity(statistics: np.ndarray) -> float:
    """`exp` of `mean_loss`; infinity if it overflows."""
    mean = mean_loss(statistics)
    return math.exp(mean) if mean < 700 else math.inf


def bits_per_token(statistics: np.ndarray) -> float:
    """`mean_loss` in bits; bits per character if tokens are characters."""
    return mean_loss(statistics) / math.log(2)


def bleu_counts(translation: str, reference: str) -> np.ndarray:
    """Statistics of an example for `bleu`, `[10]`: both lengths, then matches and totals of n-grams of 1 to 4 words."""
    counts = _sentence_bleu().sentence_score(translation, [reference])
    return np.asarray([counts.sys_len, counts.ref_len, *counts.counts, *counts.totals], dtype=np.float64)


def bleu(statistics: np.ndarray) -> float:
    """Corpus BLEU, 0 to 100, from `bleu_counts`, `[examples, 10]` (Papineni et al. 2002; as in sacrebleu)."""
    from sacrebleu.metrics import BLEU

    translated, reference, *ngrams = statistics.sum(axis=0).astype(np.int64).tolist()
    return float(BLEU.compute_bleu(ngrams[:4], ngrams[4:], translated, reference, smooth_method="exp").score)


@functools.cache
def _sentence_bleu() -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)  # on which the n-gram counts do not depend


def _has_constant(statistics: np.ndarray) -> bool:
    return not len(statistics) or bool((statistics == statistics[:1]).all(0).any())


def share(name: str, compute: Callable[[np.ndarray], float]) -> Metric:
    """A metric from 0 to 1 that is shown in points."""
    return Metric(name, compute, MetricUnit.POINTS, maximum=1.0)


ACCURACY, TOKEN_ACCURACY = share("accuracy", accuracy), share("accuracy", token_accuracy)
SPEARMAN, PEARSON = Metric("spearman", spearman, maximum=1.0), Metric("pearson", pearson, maximum=1.0)
