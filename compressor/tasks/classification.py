"""One or two texts, one class of several."""

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
from compressor.tasks.labels import class_ids, classes_of
from compressor.tasks.metrics import Metric, accuracy, f1, matthews

_METRICS: Mapping[str, Metric] = {"accuracy": accuracy, "f1": f1, "matthews": matthews}


class TextClassification(Task):
    """Classes by the largest logit; accuracy, or F1, or Matthews' correlation.

    Args:
        folder: its tokenizer makes the tokens, its configuration says how many classes there are and their names.
        request: columns and the longest text.
        metric: one of `metrics`.

    Raises:
        InputError: the model gives a row several classes at once.
    """

    name = "text-classification"
    metrics: tuple[str, ...] = tuple(_METRICS)
    higher_is_better = True

    def __init__(self, folder: ModelFolder, request: DataRequest, metric: str) -> None:
        if folder.config.problem_type == "multi_label_classification":
            raise InputError(
                f"{folder.path}: gives a row several classes at once (problem_type in config.json), only rows of one"
                " class are read; take a model for these"
            )
        self.metric = metric
        self._config = folder.config
        self._texts = Texts(folder, request)
        self._label = request.label_column
        self._ids: dict[str, int] = {}

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Number the classes as `labels.class_ids` says."""
        self._ids = class_ids(rows, label_column(rows, self._label, source), self._config, source)

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Texts to tokens and labels to classes."""
        labels = classes_of(rows, label_column(rows, self._label, source), self._ids, source)
        return Dataset.from_dict({**self._texts.encode(rows, source), "labels": labels})

    def unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Texts to tokens; the labels are zeros."""
        return Dataset.from_dict({**self._texts.encode(rows, source), "labels": [0] * len(rows)})

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`labels` `[batch]` beside the padded texts."""
        labels = torch.tensor([example["labels"] for example in examples], dtype=torch.int64)
        return {**self._texts.pad(examples), "labels": labels}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Predicted class and true class of each row, from logits `[batch, classes]`."""
        return np.stack([logits.argmax(-1), labels], axis=-1).astype(np.float64)

    def score(self, statistics: np.ndarray) -> float:
        """The metric over rows of (predicted, true)."""
        return _METRICS[self.metric](statistics[:, 0].astype(np.int64), statistics[:, 1].astype(np.int64))
