"""The base classes of tasks whose rows have a label: a class, or any number of classes."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from datasets import Dataset
from numpy.typing import DTypeLike

from compressor.answers import AnswerKind, answer_kind, class_names, has_default_names
from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, RowError
from compressor.model_folder.files import THRESHOLD_FILES, read_json
from compressor.results import NoteCode
from compressor.tasks.base import Task
from compressor.tasks.columns import LabelColumn
from compressor.tasks.labels import (
    RowLabels,
    are_vectors,
    class_ids,
    classes_of,
    columns_of_classes,
    label_lists,
    listed_names,
    no_columns,
    numbers_by_column,
)
from compressor.tasks.metrics import (
    Metric,
    f1,
    macro_f1,
    matthews,
    mean_average_precision,
    set_macro_f1,
    set_micro_f1,
    share,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from compressor.model_folder import ModelFolder

_NUMBERED = re.compile(r"(?:LABEL_)?\d+")  # names of classes that are numbers
_LEAST_GAIN = 0.1  # minimum gain of accuracy in another order of the classes
_SIGNIFICANCE = 1e-3  # maximum probability that answers are better by chance
_SEED = 0
_LISTED_CLASSES = 20  # maximum number of classes whose names a message lists


class LabelledRows(Task):
    """Base class of tasks whose rows have a column of labels, or several columns that form a label.

    Attributes:
        config: configuration of the model, with the names of its classes.
        label_type: type of the labels of a batch, int64 for classes.
        may_have_columns: whether several columns may form a label.
    """

    label_column: ClassVar[LabelColumn] = LabelColumn()
    label_type: ClassVar[DTypeLike]
    may_have_columns: ClassVar[bool] = False

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
        return self.encode_with(rows, self.encode_labels(rows, self._find_labels(rows, source), source), source)

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Encode rows whose labels are not used; every label is `placeholder`."""
        return self.encode_with(rows, itertools.repeat(self.placeholder, len(rows)), source)

    def _columns(self, rows: Dataset, source: str) -> tuple[str, ...] | None:
        """The columns that form a label; None: a single column holds all labels."""
        requested = self._request.label_column
        return columns_of_classes(rows, requested, self.config, source) if self.may_have_columns else None

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
            f"{source}: the model has no class of these names, so {rule} ({listed_names(classes)}); if the model"
            " learned another order, put id2label into its config.json"
        )
        self.note(text, NoteCode.LABELS_NUMBERED)


class ClassLabels(LabelledRows):
    """Base class of tasks whose labels are classes (`labels.class_ids`); the answer is the largest logit.

    Raises:
        InputError: the model assigns several classes to an example.
    """

    _class_ids: Mapping[str, int] = MappingProxyType({})

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        if answer_kind(folder.config) is AnswerKind.CLASSES:
            text = (
                f"{folder.path}: the model assigns several classes to a row (problem_type in config.json), this task"
                " reads one class per row; use a task that reads several, such as multi-label-classification (--task)"
            )
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=folder.path, field="problem_type")
        super().__init__(folder, request, metric)

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Map labels to classes by the rules of `labels.class_ids`."""
        names = self.config.id2label
        self._class_ids = class_ids(rows, self._find_labels(rows, source), self.config, source)
        self._note_new_names(names, "labels are numbered in sorted order, capitals first", source)

    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[int]:
        return classes_of(rows, column, self._class_ids, self.config, source)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Predicted and true class of each example, `[batch, 2]`, from logits `[batch, classes]`."""
        return np.stack([logits.argmax(-1), labels], axis=-1).astype(np.float64)

    def score(self, statistics: np.ndarray) -> float:
        """The metric; F1 of class 1 of two classes, else the mean F1 of the classes that examples have."""
        if self._metric.compute is f1 and self.config.num_labels != 2:
            return macro_f1(statistics)
        return super().score(statistics)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        return logits.argmax(-1)

    def labels_of(self, logits: np.ndarray, examples: Sequence[Mapping[str, Any]]) -> list[int]:
        return [int(index) for index in logits.argmax(-1)]

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """A correlation needs examples of two classes; F1 of two classes needs an example of class 1."""
        labels, of_class_1 = set(examples["labels"][:]), self._metric.compute is f1 and self.config.num_labels == 2
        if self._metric.compute is matthews and len(labels) == 1:
            return f"every row has the label {self._class_name(labels.pop())!r}"
        return f"no row has the label {self._class_name(1)!r}" if of_class_1 and 1 not in labels else None

    def constant_score(self, statistics: np.ndarray) -> float | None:
        labels = statistics[:, 1]
        answers = (np.full_like(labels, label) for label in np.unique(labels))
        return max(self.score(np.stack([answer, labels], axis=-1)) for answer in answers)

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        return [self._class_name(index) for index in logits.argmax(-1).tolist()]

    def reference_text(self, example: Mapping[str, Any]) -> str:
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

    The order is fitted on half of the examples, predicted and true class `[examples, 2]`. On the other half, it must be
    better than the model's order, and than the most frequent label, by a sign test, which few examples do not pass.
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
    """The class of the labels for each class of the model: the most frequent pairs first, and each class once.

    Classes without examples keep their number where they can.
    """
    pairs, counts = np.unique(answers, axis=0, return_counts=True)
    frequent = pairs[np.argsort(-counts, kind="stable")].tolist()
    order = np.full(classes, -1)
    for predicted, label in (*frequent, *((number, number) for number in range(classes))):
        if order[predicted] < 0 and label not in order:
            order[predicted] = label
    order[order < 0] = np.setdiff1d(np.arange(classes), order)
    return order


def _is_better(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether the first is right more often, by a sign test."""
    better, worse = int((first & ~second).sum()), int((second & ~first).sum())
    count = better + worse
    least = math.lgamma(count + 1) - count * math.log(2)
    logs = [least - math.lgamma(n + 1) - math.lgamma(count - n + 1) for n in range(better, count + 1)]
    return count > 0 and sum(map(math.exp, logs)) <= _SIGNIFICANCE


_COUNTS = 64
"""Numbers of frequent classes that are tried as a constant answer: 1 up to this, and as many larger numbers."""
_PRESENT = 0.5  # minimum label of a class that an example has
_KEY = "thresholds"
_DEFAULT = 0.5


class SeveralClasses(LabelledRows):
    """Base class of tasks whose labels are sets of classes; the answer is the classes that reach their threshold.

    A label is a vector of a number from 0 to 1 for each class, a list of names or numbers of classes, such names or
    numbers joined in a text, or a column for each class (`label_lists`). Numbers between 0 and 1 are soft labels, which
    the loss reads as they are; the metric counts labels from 0.5.

    Attributes:
        thresholds: the minimum probability of an assigned class, for each class in their order.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        share("micro-f1", set_micro_f1),
        share("macro-f1", set_macro_f1),
        share("map", mean_average_precision),
    )
    label_type: ClassVar[DTypeLike] = np.float32
    may_have_columns = True
    _class_ids: Mapping[str, int] = MappingProxyType({})

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        self.thresholds, self._threshold_file = read_thresholds(folder.path, folder.config)

    @property
    def placeholder(self) -> list[float]:
        return [0.0] * self._classes

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Map names to classes (`labels.class_ids`); raise InputError for another label, or if no row has a class."""
        columns, column, names = self._columns(rows, source), self._find_labels(rows, source), self.config.id2label
        reason = "the columns of labels are the classes in the order of --label-column"
        if columns is None:
            lists = label_lists(rows, column, self.config, source)
            labels = RowLabels.of(lists, column, source)
            reason = "names of labels are the classes in sorted order, capitals first"
            if labels.texts and not are_vectors(lists, self._classes):
                self._class_ids = labels.ids(self.config)
        elif has_default_names(self.config):
            self.config.id2label = dict(enumerate(columns))
            self.config.label2id = {name: index for index, name in enumerate(columns)}
        self._note_new_names(names, reason, source)
        if not any(max(vector, default=0) >= _PRESENT for vector in self.encode_labels(rows, column, source)):
            text = (
                f"{source}: {column!r} assigns no class to any row; give rows with classes, or remove the column where"
                " labels are not needed"
            )
            raise InputError(text, code=ErrorCode.INVALID_ROWS, column=column)
        if self._metric.compute is not mean_average_precision:
            text = f"{source}: both models assign a class from its threshold in {self._threshold_file} on"
            if self._threshold_file is None:
                text = (
                    f"{source}: both models assign a class from a probability of 0.5 on; for other thresholds, add "
                    f"'thresholds' to the model's config.json"
                )
            self.note(text, NoteCode.THRESHOLDS)

    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[list[float]]:
        columns = self._columns(rows, source)
        if columns is not None:
            vectors = numbers_by_column(rows, columns, source)
            for row, vector in enumerate(vectors, 1):
                for name, number in zip(columns, vector, strict=True):
                    if not 0 <= number <= 1:
                        problem = f"{name!r} is {number:g}, which is not between 0 and 1; correct it or remove the row"
                        raise RowError.of(source, row, problem, column=name, value=number)
            return vectors
        lists = label_lists(rows, column, self.config, source)
        if are_vectors(lists, self._classes):
            return [[float(text) for text in texts] for texts in lists]
        labels, ids = RowLabels.of(lists, column, source), self._class_ids
        if labels.texts and not ids:  # the labels of the first split are vectors
            ids = labels.ids(self.config)
        table = np.zeros((len(lists), self._classes))
        table[np.asarray(labels.rows, np.int64) - 1, labels.classes(ids)] = 1
        return [list(map(float, vector)) for vector in table]

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The assigned classes of each example and those of its label, `[batch, 2 classes]`, from `[batch, classes]`.

        For mean average precision, which needs no thresholds, the logits instead of the assigned classes.
        """
        logits = logits.reshape(len(labels), -1)
        answers = logits if self._metric.compute is mean_average_precision else self._assigned(logits)
        return np.concatenate([answers, labels >= _PRESENT], axis=1, dtype=np.float64)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """A hash of the assigned classes of each example."""
        digests = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in self._assigned(logits))
        return np.array([int.from_bytes(digest, "little", signed=True) for digest in digests], np.int64)

    def labels_of(self, logits: np.ndarray, examples: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        return [list(map(float, row)) for row in self._assigned(logits.reshape(len(examples), -1))]

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """F1 and average precision need an example of a class."""
        is_empty = all(max(label, default=0) < _PRESENT for label in examples["labels"][:])
        return "no row has a class" if is_empty else None

    def constant_score(self, statistics: np.ndarray) -> float:
        """The best score of the same classes for every example, among numbers of the most frequent classes."""
        labels = statistics[:, self._classes :]
        order = np.argsort(-labels.mean(0), kind="stable")
        ranks = np.argsort(order)
        first = range(1, min(len(order), _COUNTS) + 1)
        counts = np.unique([*first, *np.geomspace(1, len(order), _COUNTS).round()])
        answers = (np.tile(ranks < count, (len(labels), 1)) for count in counts)
        return max(self.score(np.concatenate([answer, labels], axis=1)) for answer in answers)

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        return [self._names_of(row) for row in self._assigned(logits.reshape(len(labels), -1))]

    def reference_text(self, example: Mapping[str, Any]) -> str:
        return self._names_of(np.asarray(example["labels"]) >= _PRESENT)

    @property
    def _classes(self) -> int:
        return int(self.config.num_labels or 0)

    def _find_labels(self, rows: Dataset, source: str) -> str:
        is_missing = not set(self.label_column.usual) & set(rows.column_names)
        if self._columns(rows, source) is None and self._request.label_column is None and is_missing:
            raise no_columns(rows, self.config, source)
        return super()._find_labels(rows, source)

    def _assigned(self, logits: np.ndarray) -> np.ndarray:
        """Whether the probability of each class reaches its threshold, `[batch, classes]`."""
        thresholds = np.asarray(self.thresholds)
        with np.errstate(divide="ignore"):
            limits = np.log(thresholds) - np.log1p(-thresholds)
        return np.asarray(logits >= limits)

    def _names_of(self, assigned: np.ndarray) -> str:
        names = class_names(self.config)
        return " | ".join(names[index] for index in np.flatnonzero(assigned).tolist()) or "no class"


def read_thresholds(folder: Path, config: PretrainedConfig) -> tuple[tuple[float, ...], Path | None]:
    """The threshold of each class, and the file that declares them; 0.5 and None if no file of the folder does.

    They are the entry `thresholds` of `config.json`, else of a file such as `thresholds.json` or
    `best_thresholds.json`, or the content of that file: a number for all classes, a list in the order of the classes,
    or an object of names and numbers. A class that the object lacks has 0.5.

    Raises:
        InputError: the thresholds are something else, or two files declare some.
    """
    declared, file = getattr(config, _KEY, None), folder / "config.json"
    if declared is None:
        files = sorted(folder.glob(THRESHOLD_FILES))
        if not files:
            return (_DEFAULT,) * len(class_names(config)), None
        if len(files) > 1:
            text = f"{folder}: {files[0].name} and {files[1].name} both declare thresholds of the classes; keep one"
            raise InputError(text, code=ErrorCode.CONTRADICTION, path=files[1], field=_KEY)
        file = files[0]
        declared = read_json(file)
        if isinstance(declared, Mapping) and isinstance(declared.get(_KEY), Mapping | list | float | int):
            declared = declared[_KEY]
    names = class_names(config)
    values = _threshold_values(declared, names)
    if values is None:
        text = (
            f"{file}: the thresholds are not a number from 0 to 1 for each of {len(names)} classes"
            f" ({', '.join(names):.80}); write a list of them, or an object of these names"
        )
        raise InputError(text, code=ErrorCode.FILE_MISMATCH, path=file, field=_KEY)
    return values, file


def _threshold_values(declared: Any, names: Sequence[str]) -> tuple[float, ...] | None:
    """A number for each class, or None if something else is declared."""
    values: list[Any]
    if isinstance(declared, Mapping):
        by_name = {str(name).strip().lower(): value for name, value in declared.items()}
        by_index = [str(index) for index in range(len(names))]
        keys = next((keys for keys in ([n.lower() for n in names], by_index) if by_name.keys() <= set(keys)), None)
        if not by_name or keys is None:
            return None
        values = [by_name.get(key, _DEFAULT) for key in keys]
    else:
        values = list(declared) if isinstance(declared, list | tuple) else [declared] * len(names)
    is_valid = all(type(value) in (int, float) and 0 <= value <= 1 for value in values)
    return tuple(map(float, values)) if is_valid and len(values) == len(names) else None
