"""The base classes of tasks whose rows have a label, and of those that assign one of a model's classes to each row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from torch import Tensor
from transformers import PretrainedConfig

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.models.answer_kind import AnswerKind, answer_kind
from compressor.results import Note, NoteCode
from compressor.tasks.base import Task
from compressor.tasks.columns import LabelColumn
from compressor.tasks.labels import class_ids, classes_of, listed_names
from compressor.tasks.metrics import f1, macro_f1, matthews

_NUMBERED = re.compile(r"(?:LABEL_)?\d+")
"""Names of classes that say nothing but their number."""


class LabelledRows(Task):
    """A task whose rows have one column of labels."""

    label_column: ClassVar[LabelColumn] = LabelColumn()
    _request: RowsConfig

    def _find_labels(self, rows: Dataset, source: str) -> str:
        """The name of the column of labels."""
        return self.label_column.find(rows, self._request.label_column, source)


class ClassLabels(LabelledRows):
    """Labels that are classes of a model, by the rules of `labels.class_ids`; the answer is the largest logit.

    Attributes:
        config: configuration of the model, with the names of its classes.
    """

    config: PretrainedConfig
    _class_ids: Mapping[str, int] = MappingProxyType({})

    @staticmethod
    def require_one_class(folder: ModelFolder) -> None:
        """Raise InputError for a model that assigns several classes to a row."""
        if answer_kind(folder.config) is AnswerKind.CLASSES:
            raise InputError(
                f"{folder.path}: the model assigns several classes to a row (problem_type in config.json), this task"
                " reads one class per row; use a task that reads several, such as multi-label-classification (--task)",
                code=ErrorCode.UNSUPPORTED_MODEL,
                path=folder.path,
                field="problem_type",
            )

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Map labels to classes by the rules of `labels.class_ids`."""
        names = self.config.id2label
        self._class_ids = class_ids(rows, self._find_labels(rows, source), self.config, source)
        if self.config.id2label != names:
            classes = listed_names([f"class {index} is {name!r}" for name, index in self._class_ids.items()])
            text = (
                f"{source}: the model has no class of these names, so that labels are numbered in sorted order,"
                f" capitals first ({classes}); if the model learned another order, put id2label into its config.json"
            )
            self.notes = (*self.notes, Note(text=text, code=NoteCode.LABELS_NUMBERED))

    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[int]:
        """The class of every row."""
        return classes_of(rows, column, self._class_ids, self.config, source)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Predicted and true class of each row, `[batch, 2]`, from logits `[batch, classes]`."""
        return np.stack([logits.argmax(-1), labels], axis=-1).astype(np.float64)

    def score(self, statistics: np.ndarray) -> float:
        """The metric; F1 is that of class 1 of two, and the mean over the classes of the rows where there are more."""
        if self._metric.compute is f1 and self.config.num_labels != 2:
            return macro_f1(statistics)
        return super().score(statistics)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, Tensor]) -> np.ndarray:
        """The predicted class of each row."""
        return logits.argmax(-1)

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """Without rows of two classes there is no correlation, without one of class 1 no F1 of two classes."""
        labels, of_class_1 = set(examples["labels"][:]), self._metric.compute is f1 and self.config.num_labels == 2
        if self._metric.compute is matthews and len(labels) == 1:
            return f"every row has the label {self._class_name(labels.pop())!r}"
        return f"no row has the label {self._class_name(1)!r}" if of_class_1 and 1 not in labels else None

    def constant_score(self, statistics: np.ndarray) -> float | None:
        """The best score of an answer that is the same class for every row."""
        labels = statistics[:, 1]
        answers = (np.full_like(labels, label) for label in np.unique(labels))
        return max(self.score(np.stack([answer, labels], axis=-1)) for answer in answers)

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        """The name of the predicted class of each row."""
        return [self._class_name(index) for index in logits.argmax(-1).tolist()]

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The name of the class of a row."""
        return self._class_name(example["labels"])

    @property
    def has_names(self) -> bool:
        """Whether labels are names of the model's classes, or the model names its classes by numbers alone."""
        names = [str(name) for name in (self.config.id2label or {}).values()]
        return set(names) <= set(self._class_ids) or all(_NUMBERED.fullmatch(name) for name in names)

    def label_of(self, index: int) -> str:
        """The label of the rows of a class."""
        name = self._class_name(index)
        texts = [text for text, number in self._class_ids.items() if number == index]
        return name if name in texts or not texts else texts[0]

    def _class_name(self, index: int) -> str:
        names: Mapping[Any, str] = self.config.id2label or {}
        return str(names.get(index, index))
