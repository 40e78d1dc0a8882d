"""The base classes of tasks whose rows have a label, and of tasks that assign a class to each row."""

from __future__ import annotations

import itertools
import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest
from torch import Tensor
from transformers import PretrainedConfig

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.models.classifiers import AnswerKind, answer_kind, class_names
from compressor.results import Note, NoteCode
from compressor.tasks.base import Task
from compressor.tasks.columns import LabelColumn
from compressor.tasks.labels import class_ids, classes_of, listed_names
from compressor.tasks.metrics import Metric, f1, macro_f1, matthews

_NUMBERED = re.compile(r"(?:LABEL_)?\d+")
"""Names of classes that are numbers."""
_LEAST_GAIN = 0.1
"""Minimum gain of accuracy in another order of the classes."""
_SIGNIFICANCE = 1e-3
"""Maximum probability that answers are better by chance."""
_SEED = 0
_LISTED_CLASSES = 20
"""Maximum number of classes whose names a message lists."""


class LabelledRows(Task):
    """Base class of tasks whose rows have a column of labels, or several columns that form a label.

    Attributes:
        config: configuration of the model, with the names of its classes.
        label_type: type of the labels of a batch, int64 for classes.
    """

    label_column: ClassVar[LabelColumn] = LabelColumn()
    label_type: ClassVar[torch.dtype]

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        self.config: PretrainedConfig = folder.config
        self._request = request

    @property
    def placeholder(self) -> Any:
        """The label of rows without labels."""
        return 0

    @abstractmethod
    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[Any]:
        """The label of every row: a number, or a list of equally many numbers for each row."""

    @abstractmethod
    def encode_with(self, rows: Dataset, labels: Iterable[Any], source: str) -> Dataset:
        """Encode rows as examples with these labels; see `Task.encode`."""

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode rows as examples, with labels as numbers."""
        return self.encode_with(rows, self.encode_labels(rows, self._find_labels(rows, source), source), source)

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Encode rows whose labels are not used; every label is `placeholder`."""
        return self.encode_with(rows, itertools.repeat(self.placeholder, len(rows)), source)

    def _columns(self, rows: Dataset, source: str) -> tuple[str, ...] | None:
        """The columns that form a label; None: a single column holds all labels."""
        return None

    def _find_labels(self, rows: Dataset, source: str) -> str:
        """The name of the column of labels, or the joined names of the columns that form a label."""
        columns = self._columns(rows, source)
        return ",".join(columns) if columns else self.label_column.find(rows, self._request.label_column, source)

    def _note_new_names(self, names: object, rule: str, source: str) -> None:
        """Note names of classes that a rule wrote into the configuration instead of `names`."""
        if self.config.id2label == names:
            return
        classes = (f"class {index} is {name!r}" for index, name in (self.config.id2label or {}).items())
        text = (
            f"{source}: the model has no class of these names, so that {rule} ({listed_names(classes)}); if the model"
            " learned another order, put id2label into its config.json"
        )
        self.notes = (*self.notes, Note(text=text, code=NoteCode.LABELS_NUMBERED))


class ClassLabels(LabelledRows):
    """Base class of tasks whose labels are classes (`labels.class_ids`); the answer is the largest logit.

    Raises:
        InputError: the model assigns several classes to an example.
    """

    _class_ids: Mapping[str, int] = MappingProxyType({})

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        if answer_kind(folder.config) is AnswerKind.CLASSES:
            raise InputError(
                f"{folder.path}: the model assigns several classes to a row (problem_type in config.json), this task"
                " reads one class per row; use a task that reads several, such as multi-label-classification (--task)",
                code=ErrorCode.UNSUPPORTED_MODEL,
                path=folder.path,
                field="problem_type",
            )
        super().__init__(folder, request, metric)

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Map labels to classes by the rules of `labels.class_ids`."""
        names = self.config.id2label
        self._class_ids = class_ids(rows, self._find_labels(rows, source), self.config, source)
        self._note_new_names(names, "labels are numbered in sorted order, capitals first", source)

    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[int]:
        """The class of every row."""
        return classes_of(rows, column, self._class_ids, self.config, source)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Predicted and true class of each example, `[batch, 2]`, from logits `[batch, classes]`."""
        return np.stack([logits.argmax(-1), labels], axis=-1).astype(np.float64)

    def score(self, statistics: np.ndarray) -> float:
        """The metric; F1 of class 1 of two classes, else the mean F1 of the classes that examples have."""
        if self._metric.compute is f1 and self.config.num_labels != 2:
            return macro_f1(statistics)
        return super().score(statistics)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, Tensor]) -> np.ndarray:
        """The predicted class of each example."""
        return logits.argmax(-1)

    def labels_of(self, logits: np.ndarray, examples: Sequence[Mapping[str, Any]]) -> list[int]:
        """The predicted class of each example."""
        return [int(index) for index in logits.argmax(-1)]

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """A correlation needs examples of two classes; F1 of two classes needs an example of class 1."""
        labels, of_class_1 = set(examples["labels"][:]), self._metric.compute is f1 and self.config.num_labels == 2
        if self._metric.compute is matthews and len(labels) == 1:
            return f"every row has the label {self._class_name(labels.pop())!r}"
        return f"no row has the label {self._class_name(1)!r}" if of_class_1 and 1 not in labels else None

    def constant_score(self, statistics: np.ndarray) -> float | None:
        """The best score of the same class for every example."""
        labels = statistics[:, 1]
        answers = (np.full_like(labels, label) for label in np.unique(labels))
        return max(self.score(np.stack([answer, labels], axis=-1)) for answer in answers)

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        """The name of the predicted class of each example."""
        return [self._class_name(index) for index in logits.argmax(-1).tolist()]

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The name of the class of an example."""
        return self._class_name(example["labels"])

    def order_text(self, statistics: np.ndarray, split: str) -> str | None:
        """Why labels seem to number the classes in another order than the model (`label_order`), and what to do."""
        classes = int(self.config.num_labels or 0)
        order = label_order(statistics, classes) if classes > 1 and statistics.shape[1:] == (2,) else None
        if order is None:
            return None
        before, after = (
            float((np.asarray(numbers)[statistics[:, 0].astype(np.int64)] == statistics[:, 1]).mean())
            for numbers in (range(classes), order)
        )
        names, labels = class_names(self.config), dict[int, str]()
        for text, number in self._class_ids.items():
            labels.setdefault(number, text)
        labels |= {index: name for index, name in enumerate(names) if self._class_ids.get(name) == index}
        listed = {number: labels.get(label, names[label]) for number, label in enumerate(order)}
        moved = [number for number, label in enumerate(order) if number != label][:_LISTED_CLASSES]
        remedy = "write the names of the classes as labels"
        if set(names) <= set(self._class_ids) or all(_NUMBERED.fullmatch(name) for name in names):
            entry = "" if len(order) > _LISTED_CLASSES else f": {json.dumps(listed)}"
            remedy = f'name the classes in this order in config.json ("id2label"{entry})'
        pairs = ", ".join(f"{names[number]!r} for {listed[number]!r}" for number in moved)
        return (
            f"the labels of the {split} rows seem to have another order than the classes of the model: it is right on"
            f" {before:.0%} of the rows, and on {after:.0%} if it means {pairs}; {remedy}"
        )

    def _class_name(self, index: int) -> str:
        names: Mapping[Any, str] = self.config.id2label or {}
        return str(names.get(index, index))


def label_order(statistics: np.ndarray, classes: int) -> list[int] | None:
    """The class of the labels for each class of the model, if the model is far better in this order, else None.

    The order is fitted on half of the examples. On the other half, it must be better than the model's order, and than
    the most frequent label, by a sign test, which few examples do not pass.

    Args:
        statistics: predicted and true class of each example, `[examples, 2]`.
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
    """The order of classes in which most answers are right; classes without examples keep their number."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, tuple(answers.T), 1)
    counts += 0.5 * np.eye(classes)
    return np.asarray(linear_sum_assignment(counts, maximize=True)[1])


def _is_better(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether the first answers are right more often than the second, by a sign test."""
    better, worse = int((first & ~second).sum()), int((second & ~first).sum())
    return better + worse > 0 and binomtest(better, better + worse, alternative="greater").pvalue <= _SIGNIFICANCE
