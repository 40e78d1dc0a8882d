"""One or two texts, one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from compressor.errors import InputError
from compressor.model_folder import ModelFolder
from compressor.tasks.base import DataRequest, Task
from compressor.tasks.columns import label_column
from compressor.tasks.encoding import Texts
from compressor.tasks.labels import numbers_of
from compressor.tasks.metrics import Metric, pearson, spearman

_METRICS: Mapping[str, Metric] = {"spearman": spearman, "pearson": pearson}


class Regression(Task):
    """A number by the model's one logit; Spearman's or Pearson's correlation with the label.

    Args:
        folder: its tokenizer makes the tokens; its model must have one output and a squared loss.
        request: columns and the longest text.
        metric: one of `metrics`.

    Raises:
        InputError: the model has several outputs.
    """

    name = "regression"
    metrics: tuple[str, ...] = tuple(_METRICS)
    higher_is_better = True

    def __init__(self, folder: ModelFolder, request: DataRequest, metric: str) -> None:
        if folder.config.num_labels != 1:
            raise InputError(
                f"{folder.path}: its head has {folder.config.num_labels} outputs, regression has one; fine-tune it with"
                " num_labels=1, or name the task text-classification (--task)"
            )
        self.metric = metric
        self._texts = Texts(folder, request)
        self._label = request.label_column

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """A correlation needs labels that differ."""
        column = label_column(rows, self._label, source)
        numbers = numbers_of(rows, column, source)
        if min(numbers) == max(numbers):
            raise InputError(f"{source}: every row has the label {numbers[0]:g}; give rows whose {column!r} differ")

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Texts to tokens and labels to numbers."""
        labels = numbers_of(rows, label_column(rows, self._label, source), source)
        return Dataset.from_dict({**self._texts.encode(rows, source), "labels": labels})

    def unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Texts to tokens; the labels are zeros."""
        return Dataset.from_dict({**self._texts.encode(rows, source), "labels": [0] * len(rows)})

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`labels` `[batch]` float32 beside the padded texts."""
        labels = torch.tensor([example["labels"] for example in examples], dtype=torch.float32)
        return {**self._texts.pad(examples), "labels": labels}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Predicted and true number of each row, from logits `[batch, 1]`."""
        return np.stack([logits.reshape(len(labels), -1)[:, 0], labels], axis=-1).astype(np.float64)

    def score(self, statistics: np.ndarray) -> float:
        """The metric over rows of (predicted, true)."""
        return _METRICS[self.metric](statistics[:, 0], statistics[:, 1])
