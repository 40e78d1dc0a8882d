"""Regression: predict a number from one or two texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.tasks.encoding import LabelledTexts
from compressor.tasks.labels import numbers_of
from compressor.tasks.metrics import Metric, pearson, spearman


class Regression(LabelledTexts):
    """Regression by the model's only logit, scored by its correlation with the label.

    Args:
        folder: its tokenizer encodes the texts; its model has one output and a squared loss.
        request: columns and maximum row length.
        metric: one of `metrics`.

    Raises:
        InputError: the model has several outputs, or the maximum row length leaves no room for text.
    """

    name = "regression"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("spearman", spearman, maximum=1.0),
        Metric("pearson", pearson, maximum=1.0),
    )
    label_type = torch.float32

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        if folder.config.num_labels != 1:
            raise InputError(
                f"{folder.path}: its head has {folder.config.num_labels} outputs, regression needs one; fine-tune it"
                " with num_labels=1, or use the task text-classification (--task)",
                code=ErrorCode.UNSUPPORTED_MODEL,
                path=folder.path,
                field="num_labels",
                value=folder.config.num_labels,
            )
        super().__init__(folder, request, metric)

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Check that labels differ, which a correlation requires.

        Raises:
            InputError: a label is not a number, or all are the same.
        """
        column = self._find_labels(rows, source)
        numbers = numbers_of(rows, column, source)
        if min(numbers) == max(numbers):
            raise InputError(
                f"{source}: every row has the label {numbers[0]:g}; give rows with different values of {column!r}",
                code=ErrorCode.INVALID_ROWS,
                column=column,
                value=numbers[0],
            )

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """Without differing labels there is no correlation."""
        labels = examples["labels"][:]
        return None if min(labels) < max(labels) else f"every row has the label {labels[0]:g}"

    def constant_score(self, statistics: np.ndarray) -> float:
        """The score of an answer that is the same number for every row."""
        return self.score(np.stack([np.zeros(len(statistics)), statistics[:, 1]], axis=-1))

    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[float]:
        """The number of every row."""
        return numbers_of(rows, column, source)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Predicted and true number of each row, `[batch, 2]`, from logits `[batch, 1]`."""
        return np.stack([logits.reshape(len(labels), -1)[:, 0], labels], axis=-1).astype(np.float64)

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        """The predicted number of each row."""
        return [f"{number:.4g}" for number in logits.reshape(len(labels), -1)[:, 0].tolist()]

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The number of a row."""
        return f"{example['labels']:.4g}"
