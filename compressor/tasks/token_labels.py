"""The base class of tasks that score tokens with a label."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasets import Dataset
from torch import Tensor

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.results import Note, NoteCode
from compressor.tasks.base import Task
from compressor.tasks.columns import TextColumns
from compressor.tasks.encoding import TextTokenizer, count_cut, encode_chunks, pad
from compressor.tasks.forwards import IGNORED
from compressor.tasks.metrics import Metric


class TokenLabels(Task):
    """Base class of tasks that score tokens with a label.

    Examples have the columns `input_ids`, `labels` (-100: the token is not scored) and `length`.

    Raises:
        InputError: the maximum length leaves no room for text.
    """

    text_columns: ClassVar[TextColumns] = TextColumns(counts=(1,))

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        self._request = request
        self._tokenizer = folder.processor
        self._texts = TextTokenizer(folder, request)

    @abstractmethod
    def label_text(self, ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens of a plain text as the model reads them, and the label of each."""

    @abstractmethod
    def count(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[float]:
        """Statistics of the scored tokens of an example, from logits `[tokens, classes]` and labels `[tokens]`."""

    def encode_texts(self, rows: Dataset, source: str) -> Dataset:
        """Encode a plain text of each row; rows without a token to score are dropped, which a note says.

        Args:
            rows: rows with a column of text.
            source: name of the rows in error messages.

        Raises:
            InputError: no row has a token to score.
        """
        (column,) = self.text_columns.find(rows, self._request.text_columns, source)

        def encode(chunk: Dataset, _: int) -> tuple[pa.Table, int]:
            encodings = self._texts(list(chunk[column]))
            examples = [self.label_text(ids) for ids in encodings["input_ids"]]
            scored = [example for example in examples if set(example[1]) - {IGNORED}]
            return table_of(*zip(*scored, strict=True)) if scored else table_of((), ()), count_cut(encodings)

        encoded, cut = encode_chunks(rows, encode)
        if not len(encoded):
            problem = f"{source}: no row has a token that is scored; give rows of text"
            raise InputError(problem, code=ErrorCode.TOO_FEW_ROWS, column=column, rows=0)
        if left_out := len(rows) - len(encoded):
            text = f"{source}: {left_out} of {len(rows)} rows have no token that is scored, and are left out"
            self.notes = (*self.notes, Note(text=text, code=NoteCode.ROWS_LEFT_OUT))
        self.notes = (*self.notes, *self._texts.cut_notes(source, cut, len(rows)))
        return encoded

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Token ids, mask, token types and `labels`, each `[examples, longest]`, padded on the right."""
        batch = self._texts.collate([example["input_ids"] for example in examples])
        return {**batch, self.label_name: pad([example["labels"] for example in examples], IGNORED)}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """`count` of each example, `[examples, k]`, from logits `[examples, position, classes]`."""
        rows = zip(logits, labels, labels != IGNORED, strict=True)
        return np.array([self.count(scores[scored], row[scored]) for scores, row, scored in rows], dtype=np.float64)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, Tensor]) -> np.ndarray:
        """The predicted class of each token that is not padding."""
        return logits.argmax(-1)[batch["attention_mask"].numpy() != 0]


def table_of(ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> pa.Table:
    """A table of examples, from the ids and the labels of each."""
    numbers = pa.list_(pa.int64())
    return pa.table(
        {
            "input_ids": pa.array(ids, numbers),
            "labels": pa.array(labels, numbers),
            "length": pa.array(map(len, ids), pa.int64()),
        }
    )
