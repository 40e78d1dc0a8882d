"""The base class of tasks that assign any number of classes to a row, and the thresholds of classes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PretrainedConfig

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, RowError
from compressor.model_folder import ModelFolder
from compressor.model_folder.companions import THRESHOLD_FILES
from compressor.model_folder.files import read_json
from compressor.models.classifiers import class_names, has_default_names
from compressor.results import MetricUnit, Note, NoteCode
from compressor.tasks.labelled_rows import LabelledRows
from compressor.tasks.labels import (
    RowLabels,
    are_vectors,
    columns_of_classes,
    label_lists,
    no_columns,
    numbers_by_column,
)
from compressor.tasks.metrics import Metric, mean_average_precision, set_macro_f1, set_micro_f1

_COUNTS = 64
"""Numbers of frequent classes that are tried as a constant answer: 1 up to this, and as many larger numbers."""
_PRESENT = 0.5
"""Minimum label of a class that an example has."""
_KEY = "thresholds"
_DEFAULT = 0.5


class SeveralClasses(LabelledRows):
    """Base class of tasks whose labels are sets of classes; the answer is the classes that reach their threshold.

    A label is a vector of a number from 0 to 1 for each class, a list of names or numbers of classes, such names or
    numbers joined in a text, or a column for each class (`label_lists`). Numbers between 0 and 1 are soft labels, which
    the loss reads as they are; the metric counts labels from 0.5.

    Attributes:
        thresholds: the minimum probabilities of assigned classes.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("micro-f1", set_micro_f1, MetricUnit.POINTS, maximum=1.0),
        Metric("macro-f1", set_macro_f1, MetricUnit.POINTS, maximum=1.0),
        Metric("map", mean_average_precision, MetricUnit.POINTS, maximum=1.0),
    )
    label_type: ClassVar[torch.dtype] = torch.float32
    _class_ids: Mapping[str, int] = MappingProxyType({})

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        self.thresholds = read_thresholds(folder.path, folder.config)

    @property
    def placeholder(self) -> list[float]:
        """The label of rows without labels."""
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
            raise InputError(
                f"{source}: {column!r} assigns no class to any row; give rows with classes, or remove the column where"
                " labels are not needed",
                code=ErrorCode.INVALID_ROWS,
                column=column,
            )
        if self._metric.compute is not mean_average_precision:
            text = f"{source}: classes are assigned from the thresholds of {self.thresholds.file} on, by both models"
            if self.thresholds.file is None:
                text = (
                    f"{source}: classes are assigned from a probability of 0.5 on; where others are served, put"
                    " thresholds into the model's config.json"
                )
            self.notes = (*self.notes, Note(text=text, code=NoteCode.THRESHOLDS))

    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[list[float]]:
        """The number of each class for every example."""
        columns = self._columns(rows, source)
        if columns is not None:
            vectors = numbers_by_column(rows, columns, source)
            self._require_shares(vectors, columns, source)
            return vectors
        lists = label_lists(rows, column, self.config, source)
        if are_vectors(lists, self._classes):
            return [[float(text) for text in texts] for texts in lists]
        return self._vectors(lists, column, source)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The assigned classes of each example and those of its label, `[batch, 2 classes]`, from `[batch, classes]`.

        For mean average precision, which needs no thresholds, the logits instead of the assigned classes.
        """
        logits = logits.reshape(len(labels), -1)
        answers = logits if self._metric.compute is mean_average_precision else self._assigned(logits)
        return np.concatenate([answers, labels >= _PRESENT], axis=1, dtype=np.float64)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, Tensor]) -> np.ndarray:
        """A hash of the assigned classes of each example."""
        digests = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in self._assigned(logits))
        return np.array([int.from_bytes(digest, "little", signed=True) for digest in digests], np.int64)

    def labels_of(self, logits: np.ndarray, examples: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        """The assigned classes of each example."""
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
        """The names of the assigned classes of each example."""
        return [self._names_of(row) for row in self._assigned(logits.reshape(len(labels), -1))]

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The names of the classes of an example."""
        return self._names_of(np.asarray(example["labels"]) >= _PRESENT)

    @property
    def _classes(self) -> int:
        return int(self.config.num_labels or 0)

    def _find_labels(self, rows: Dataset, source: str) -> str:
        """The name of the column of labels, or the joined names of the columns of classes."""
        is_missing = not set(self.label_column.usual) & set(rows.column_names)
        if self._columns(rows, source) is None and self._request.label_column is None and is_missing:
            raise no_columns(rows, self.config, source)
        return super()._find_labels(rows, source)

    def _columns(self, rows: Dataset, source: str) -> tuple[str, ...] | None:
        return columns_of_classes(rows, self._request.label_column, self.config, source)

    def _require_shares(self, vectors: Sequence[Sequence[float]], columns: Sequence[str], source: str) -> None:
        """Raise InputError unless all numbers are from 0 to 1."""
        for row, vector in enumerate(vectors, 1):
            for column, number in zip(columns, vector, strict=True):
                if not 0 <= number <= 1:
                    problem = (
                        f"{column!r} is {number:g}, neither 1 nor 0 nor between them; correct it or remove the row"
                    )
                    raise RowError.of(source, row, problem, column=column, value=number)

    def _vectors(self, lists: Sequence[Sequence[str]], column: str, source: str) -> list[list[float]]:
        """A number for each class, from lists of names or numbers of classes."""
        labels, ids = RowLabels.of(lists, column, source), self._class_ids
        if labels.texts and not ids:  # the labels of the first split are vectors
            ids = labels.ids(self.config)
        vectors = np.zeros((len(lists), self._classes))
        vectors[np.asarray(labels.rows, np.int64) - 1, labels.classes(ids)] = 1
        return [list(map(float, vector)) for vector in vectors]

    def _assigned(self, logits: np.ndarray) -> np.ndarray:
        """Whether the probability of each class reaches its threshold, `[batch, classes]`."""
        thresholds = np.asarray(self.thresholds.values)
        with np.errstate(divide="ignore"):
            limits = np.log(thresholds) - np.log1p(-thresholds)
        return np.asarray(logits >= limits)

    def _names_of(self, assigned: np.ndarray) -> str:
        names = class_names(self.config)
        return " | ".join(names[index] for index in np.flatnonzero(assigned).tolist()) or "no class"


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of the classes.

    Attributes:
        values: a threshold for each class, in their order.
        file: the file that declares them; None: no file of the folder does.
    """

    values: tuple[float, ...]
    file: Path | None = None


def read_thresholds(folder: Path, config: PretrainedConfig) -> Thresholds:
    """The thresholds of a folder; 0.5 for every class if it declares none.

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
            return Thresholds((_DEFAULT,) * len(class_names(config)))
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
    return Thresholds(values, file)


def _threshold_values(declared: Any, names: Sequence[str]) -> tuple[float, ...] | None:
    """A number for each class, or None if something else is declared."""
    values: list[Any]
    if isinstance(declared, Mapping):
        by_name = {str(name).strip().lower(): value for name, value in declared.items()}
        keys = [name.lower() for name in names]
        if not by_name.keys() <= set(keys):
            keys = [str(index) for index in range(len(names))]
        if not by_name or not by_name.keys() <= set(keys):
            return None
        values = [by_name.get(key, _DEFAULT) for key in keys]
    else:
        values = list(declared) if isinstance(declared, list | tuple) else [declared] * len(names)
    is_valid = all(type(value) in (int, float) and 0 <= value <= 1 for value in values)
    return tuple(map(float, values)) if is_valid and len(values) == len(names) else None
