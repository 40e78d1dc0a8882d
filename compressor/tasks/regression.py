"""Regression: predict a number, or several, from one or two texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset

from compressor.errors import ErrorCode, InputError
from compressor.tasks.encoding import LabelledTexts
from compressor.tasks.labels import columns_of_classes, number_lists, numbers_by_column, numbers_of
from compressor.tasks.metrics import Metric, pearson, spearman


class Regression(LabelledTexts):
    """Regression by the logits of the model, scored by their correlation with the label.

    A model with several outputs predicts as many numbers. A label is then a list of them, or there is one column for
    each (`label_lists`), and the metric is the mean over them.

    Args:
        folder: its tokenizer encodes the texts; its configuration has the number of outputs.
        request: columns and maximum row length.
        metric: one of `metrics`.

    Raises:
        InputError: the maximum row length leaves no room for text.
    """

    name = "regression"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("spearman", spearman, maximum=1.0),
        Metric("pearson", pearson, maximum=1.0),
    )
    label_type = torch.float32

    @property
    def placeholder(self) -> Any:
        """The label of rows without labels."""
        return 0 if self._numbers == 1 else [0.0] * self._numbers

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Check that labels differ, which a correlation requires.

        Raises:
            InputError: a label is not a number, or all are the same.
        """
        column = self._find_labels(rows, source)
        columns = self._columns(rows, source)
        labels = _as_table(self.encode_labels(rows, column, source))
        if (constant := _constant_number(labels)) is not None:
            name = columns[constant] if columns else column
            raise InputError(
                f"{source}: every row has the label {labels[0, constant]:g}; give rows with different values of"
                f" {name!r}",
                code=ErrorCode.INVALID_ROWS,
                column=name,
                value=float(labels[0, constant]),
            )

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """Without differing labels there is no correlation."""
        labels = _as_table(examples["labels"][:])
        constant = _constant_number(labels)
        return None if constant is None else f"every row has the label {labels[0, constant]:g}"

    def constant_score(self, statistics: np.ndarray) -> float | None:
        """The score of an answer that is the same number for every row."""
        predicted, labels = np.split(statistics, 2, axis=1)
        return self.score(np.concatenate([np.zeros_like(predicted), labels], axis=1))

    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[Any]:
        """The number of every row, or a list of numbers."""
        columns = self._columns(rows, source)
        if columns is not None:
            numbers = numbers_by_column(rows, columns, source)
            return numbers if self._numbers > 1 else [number for (number,) in numbers]
        if self._numbers == 1:
            return numbers_of(rows, column, source)
        return number_lists(rows, column, self.config, source)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Predicted and true numbers of each row, `[batch, 2 numbers]`, from logits `[batch, numbers]`."""
        parts = (values.reshape(len(labels), -1) for values in (logits, labels))
        return np.concatenate(list(parts), axis=1, dtype=np.float64)

    def score(self, statistics: np.ndarray) -> float:
        """The metric, the mean over the numbers of a row."""
        predicted, labels = np.split(statistics, 2, axis=1)
        pairs = zip(predicted.T, labels.T, strict=True)
        return float(np.mean([super(Regression, self).score(np.stack(pair, axis=-1)) for pair in pairs]))

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        """The predicted numbers of each row."""
        return [_text_of(numbers) for numbers in logits.reshape(len(labels), -1).tolist()]

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The numbers of a row."""
        return _text_of(np.atleast_1d(example["labels"]).tolist())

    @property
    def _numbers(self) -> int:
        """How many numbers the model predicts."""
        return int(self.config.num_labels or 1)

    def _columns(self, rows: Dataset, source: str) -> tuple[str, ...] | None:
        return columns_of_classes(rows, self._request.label_column, self.config, source)


def _as_table(labels: Sequence[Any]) -> np.ndarray:
    """Labels as `[rows, numbers]`."""
    return np.asarray(labels, np.float64).reshape(len(labels), -1)


def _constant_number(labels: np.ndarray) -> int | None:
    """The first of the numbers `[rows, numbers]` that is the same in every row; None: there is none."""
    constant = np.flatnonzero((labels == labels[:1]).all(0))
    return int(constant[0]) if len(constant) else None


def _text_of(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)
