"""Text classification: predict one of several classes from one or two texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.results import MetricUnit
from compressor.tasks.encoding import LabelledTexts
from compressor.tasks.labels import class_ids, classes_of
from compressor.tasks.metrics import Metric, accuracy, f1, matthews


class TextClassification(LabelledTexts):
    """Classification by the largest logit, scored by accuracy, F1 or Matthews correlation.

    Args:
        folder: its tokenizer encodes the texts; its configuration has the number of classes and their names.
        request: columns and maximum row length.
        metric: one of `metrics`.

    Raises:
        InputError: the model assigns several classes to a row, or the maximum row length leaves no room for text.
    """

    name = "text-classification"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", accuracy, MetricUnit.POINTS, maximum=1.0),
        Metric("f1", f1, MetricUnit.POINTS, maximum=1.0),
        Metric("matthews", matthews, maximum=1.0),
    )
    label_type = torch.int64

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        if folder.config.problem_type == "multi_label_classification":
            raise InputError(
                f"{folder.path}: the model assigns several classes to a row (problem_type in config.json), this task"
                " reads one class per row; use a model trained for one class per row",
                code=ErrorCode.UNSUPPORTED_MODEL,
                path=folder.path,
                field="problem_type",
            )
        super().__init__(folder, request, metric)
        self._class_ids: dict[str, int] = {}

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Map labels to classes by the rules of `labels.class_ids`."""
        self._class_ids = class_ids(rows, self._find_labels(rows, source), self.config, source)

    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[int]:
        """The class of every row."""
        return classes_of(rows, column, self._class_ids, source)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Predicted and true class of each row, `[batch, 2]`, from logits `[batch, classes]`."""
        return np.stack([logits.argmax(-1), labels], axis=-1).astype(np.float64)

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        """The name of the predicted class of each row."""
        return [self._class_name(index) for index in logits.argmax(-1).tolist()]

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The name of the class of a row."""
        return self._class_name(example["labels"])

    def _class_name(self, index: int) -> str:
        names: dict[Any, str] = dict(self.config.id2label or {})
        return str(names.get(index, index))
