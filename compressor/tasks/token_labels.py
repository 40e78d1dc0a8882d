"""Base class of tasks with labels for tokens: batches in which other tokens are not scored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from compressor.config.sections import RowsConfig
from compressor.model_folder import ModelFolder
from compressor.model_folder.example_inputs import takes_token_types
from compressor.tasks.base import Task
from compressor.tasks.encoding import pad, row_length
from compressor.tasks.forwards import IGNORED
from compressor.tasks.metrics import Metric


class TokenLabels(Task):
    """Base class of tasks that score some tokens of a row.

    Encoded rows have the columns `input_ids`, `labels` (-100: the token is not scored) and `length`.

    Args:
        folder: its tokenizer encodes the texts.
        request: columns and maximum row length.
        metric: one of `metrics`.

    Raises:
        InputError: the maximum row length leaves no room for text.
    """

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        self._request = request
        self._tokenizer = folder.processor
        self._longest = row_length(folder, request, texts=1)
        self._with_token_types = takes_token_types(folder.model, folder.processor)

    @abstractmethod
    def count(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[float]:
        """Statistics of the scored tokens of a row, from their logits `[tokens, classes]` and labels `[tokens]`."""

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Token ids, mask, token types and `labels`, each `[rows, longest]`, padded on the right."""
        padding = self._tokenizer.pad_token_id
        ids = pad([example["input_ids"] for example in examples], 0 if padding is None else padding)
        batch = {"input_ids": ids, "attention_mask": pad([[1] * example["length"] for example in examples], 0)}
        if self._with_token_types:
            batch["token_type_ids"] = ids.new_zeros(ids.shape)
        return {**batch, self.label_name: pad([example["labels"] for example in examples], IGNORED)}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """`count` of each row, `[rows, k]`, from logits `[rows, positions, classes]`."""
        rows = zip(logits, labels, labels != IGNORED, strict=True)
        return np.array([self.count(scores[scored], row[scored]) for scores, row, scored in rows], dtype=np.float64)
