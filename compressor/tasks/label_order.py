"""Whether the labels of scored rows number the classes in another order than the model."""

from __future__ import annotations

import json

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest

from compressor.models.class_names import class_names
from compressor.tasks.base import Task
from compressor.tasks.labelled_rows import ClassLabels

_LEAST_GAIN = 0.1
"""Share of the rows by which the answers must be better in another order."""
_SIGNIFICANCE = 1e-3
"""Largest probability that answers are better by chance."""
_SEED = 0
_LISTED = 20
"""Most classes whose names a message writes down."""


def label_order(statistics: np.ndarray, classes: int) -> list[int] | None:
    """The class of the labels for each class of the model, if the model is far better in this order; None: it is not.

    The order is fitted on half of the rows. On the other half it must be right where the model's own order is wrong,
    and where the most frequent label is wrong, more often than the reverse, by a sign test. Few rows show none.

    Args:
        statistics: predicted and true class of each row, `[rows, 2]`.
        classes: number of classes.
    """
    answers = statistics.astype(np.int64)
    halves = np.array_split(np.random.default_rng(_SEED).permutation(len(answers)), 2)
    fitted, tested = (answers[np.sort(half)] for half in halves)
    order = _best_order(fitted, classes)
    predicted, labels = tested.T
    if not len(tested) or (order == np.arange(classes)).all():
        return None
    is_right = order[predicted] == labels
    by_model, constant = predicted == labels, labels == np.bincount(labels).argmax()
    if is_right.mean() < by_model.mean() + _LEAST_GAIN:
        return None
    if not (_is_better(is_right, by_model) and _is_better(is_right, constant)):
        return None
    whole = _best_order(answers, classes)
    return [int(number) for number in whole]


def _best_order(answers: np.ndarray, classes: int) -> np.ndarray:
    """The order of classes in which most answers are right; classes that rows do not tell stay where they are."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, tuple(answers.T), 1)
    counts += 0.5 * np.eye(classes)
    return np.asarray(linear_sum_assignment(counts, maximize=True)[1])


def _is_better(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether the first answers are right more often than the second, by a sign test on the rows where they differ."""
    better, worse = int((first & ~second).sum()), int((second & ~first).sum())
    return better + worse > 0 and binomtest(better, better + worse, alternative="greater").pvalue <= _SIGNIFICANCE


def order_text(task: Task, statistics: np.ndarray, split: str) -> str | None:
    """What the labels of scored rows show of their order, and how to mend it; None: they have the model's order.

    Args:
        task: the task that scored the rows.
        statistics: those of the whole model, `[rows, k]`.
        split: the rows that were scored.
    """
    classes = int(getattr(task.config, "num_labels", 0) or 0) if isinstance(task, ClassLabels) else 0
    if not isinstance(task, ClassLabels) or classes < 2 or statistics.ndim != 2 or statistics.shape[1] != 2:
        return None
    order = label_order(statistics, classes)
    if order is None:
        return None
    moved = [number for number, other in enumerate(order) if number != other]
    own, permuted = (
        float((np.asarray(numbers)[statistics[:, 0].astype(np.int64)] == statistics[:, 1]).mean())
        for numbers in (range(classes), order)
    )
    names = class_names(task.config)
    pairs = [f"{names[number]!r} for {task.label_of(order[number])!r}" for number in moved[:_LISTED]]
    remedy = f"name the classes in this order in config.json ({_names(task, order)})"
    if not task.has_names:
        remedy = "write the names of the classes as labels"
    return (
        f"the labels of the {split} rows seem to have another order than the classes of the model: it is right on"
        f" {own:.0%} of the rows, and on {permuted:.0%} if it means {', '.join(pairs)}; {remedy}"
    )


def _names(task: ClassLabels, order: list[int]) -> str:
    """`id2label` in another order, as `config.json` holds it."""
    if len(order) > _LISTED:
        return '"id2label"'
    return f'"id2label": {json.dumps({str(number): task.label_of(other) for number, other in enumerate(order)})}'
