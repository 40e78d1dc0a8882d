"""Base class of tasks with labels for tokens: other tokens are not scored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasets import Dataset
from torch import Tensor
from transformers import BatchEncoding

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.example_inputs import takes_token_types
from compressor.results import Note, NoteCode
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Task
from compressor.tasks.columns import TextColumns
from compressor.tasks.encoding import chunks_of, count_cut, cut_notes, pad, padding_id, row_length
from compressor.tasks.forwards import IGNORED
from compressor.tasks.metrics import Metric
from compressor.tasks.row_store import RowStore


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

    text_columns: ClassVar[TextColumns] = TextColumns(counts=(1,))

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        self._request = request
        self._tokenizer = folder.processor
        self._padding = padding_id(folder)
        self._longest = row_length(folder, request, texts=1)
        self._with_token_types = takes_token_types(folder.model, folder.processor)

    @abstractmethod
    def label_text(self, ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """What the model reads of the tokens of a plain text, and the label of each."""

    @abstractmethod
    def count(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[float]:
        """Statistics of the scored tokens of a row, from their logits `[tokens, classes]` and labels `[tokens]`."""

    def encode_texts(self, rows: Dataset, source: str) -> Dataset:
        """Encode plain texts, one per row; rows without a token to score are left out, which is noted.

        Args:
            rows: rows with a column of text.
            source: name of the rows in error messages.

        Raises:
            InputError: no row has a token to score.
        """
        (column,) = self.text_columns.find(rows, self._request.text_columns, source)
        store, kept, cut = RowStore(), 0, 0
        for _, chunk in chunks_of(rows):
            encodings = self._tokenize_texts(list(chunk[column]))
            cut += count_cut(encodings)
            examples = [self.label_text(ids) for ids in encodings["input_ids"]]
            scored = [example for example in examples if set(example[1]) - {IGNORED}]
            kept += len(scored)
            store.add(table_of(*zip(*scored, strict=True)) if scored else table_of((), ()))
        if not kept:
            raise InputError(
                f"{source}: no row has a token that is scored; give rows of text",
                code=ErrorCode.TOO_FEW_ROWS,
                column=column,
                rows=0,
            )
        if kept < len(rows):
            text = f"{source}: {len(rows) - kept} of {len(rows)} rows have no token that is scored, and are left out"
            self.notes = (*self.notes, Note(text=text, code=NoteCode.ROWS_LEFT_OUT))
        self.notes = (*self.notes, *cut_notes(source, cut, len(rows), self._longest))
        return store.finish()

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Token ids, mask, token types and `labels`, each `[rows, longest]`, padded on the right."""
        ids = pad([example["input_ids"] for example in examples], self._padding)
        batch = {"input_ids": ids, "attention_mask": pad([[1] * example["length"] for example in examples], 0)}
        if self._with_token_types:
            batch["token_type_ids"] = ids.new_zeros(ids.shape)
        return {**batch, self.label_name: pad([example["labels"] for example in examples], IGNORED)}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """`count` of each row, `[rows, k]`, from logits `[rows, positions, classes]`."""
        rows = zip(logits, labels, labels != IGNORED, strict=True)
        return np.array([self.count(scores[scored], row[scored]) for scores, row, scored in rows], dtype=np.float64)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, Tensor]) -> np.ndarray:
        """The predicted class of each token that is not padding."""
        return logits.argmax(-1)[batch["attention_mask"].numpy() != 0]

    def _tokenize_texts(self, texts: list[str]) -> BatchEncoding:
        if not texts:
            return BatchEncoding({"input_ids": []})
        with quiet_transformers():
            encoding: BatchEncoding = self._tokenizer(texts, truncation=True, max_length=self._longest)
        return encoding


def table_of(ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> pa.Table:
    """Encoded rows as a table, from the ids and the labels of each."""
    numbers = pa.list_(pa.int64())
    return pa.table(
        {
            "input_ids": pa.array(ids, numbers),
            "labels": pa.array(labels, numbers),
            "length": pa.array(map(len, ids), pa.int64()),
        }
    )
