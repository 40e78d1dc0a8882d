"""Language modelling: predict the next token of plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressor.config.sections import RowsConfig
from compressor.config.values import PLAIN_TEXT
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.example_inputs import token_limit
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Task
from compressor.tasks.columns import TextColumns
from compressor.tasks.metrics import Metric, perplexity

_TEXTS_PER_CALL = 64
"""Number of texts per call of the tokenizer."""

PERPLEXITY = Metric("perplexity", perplexity, higher_is_better=False)


class CausalLM(Task):
    """Perplexity over segments of the concatenated rows, which have the maximum length.

    Lines of plain text files are joined by line ends; rows of other files and data sets are joined by the end token, or
    by line ends if the tokenizer has none. The first token of a segment is not predicted. The last, shorter segment is
    kept if a token can be predicted in it.

    Raises:
        InputError: a segment is too short to predict a token.
    """

    name = "causal-lm"
    metrics: ClassVar[tuple[Metric, ...]] = (PERPLEXITY,)
    text_columns: ClassVar[TextColumns] = TextColumns(counts=(1,))
    shortest: ClassVar[int] = 2
    """Minimum tokens of a segment in which a token can be predicted."""
    joined_rows: ClassVar[int] = 1000

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        self._tokenizer = folder.processor
        self._columns = request.text_columns
        limit = token_limit(folder.model)
        self._segment_length = min(request.max_length, limit) if limit else request.max_length
        if self._segment_length < self.shortest:
            raise InputError(
                f"{folder.path}: no token can be predicted in segments of {self._segment_length}; raise --max-length",
                code=ErrorCode.OUT_OF_RANGE,
                field="max_length",
                value=self._segment_length,
                minimum=self.shortest,
            )

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode the text as segments: columns `input_ids` and `length`.

        Raises:
            InputError: the column of text is missing, or no token can be predicted in the text.
        """
        (name,) = self.text_columns.find(rows, self._columns, source)
        texts = rows[name][:]
        ids = self.token_stream(texts, lines=rows.info.builder_name == PLAIN_TEXT)
        self._check_vocabulary(texts, ids, source)
        starts, ends = self._segment_bounds(len(ids))
        if not len(starts):
            text = f"{source}: no token can be predicted in {len(ids)} token(s); give more text"
            raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, tokens=len(ids))
        return _slice_rows(ids, starts, ends)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Segments `[batch, segment]` with their mask; `labels` are the ids, which the model shifts.

        Padding on the right is masked, and has no labels (-100).
        """
        segments = [torch.as_tensor(example["input_ids"], dtype=torch.int64) for example in examples]
        ids, labels = (pad_sequence(segments, batch_first=True, padding_value=fill) for fill in (0, -100))
        return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Summed loss in nats and predicted tokens of each segment, from logits `[batch, segment, vocabulary]`."""
        return summed_loss(torch.from_numpy(logits[:, :-1]), torch.from_numpy(labels[:, 1:])).numpy()

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, Tensor]) -> np.ndarray:
        """The token that is predicted after each token except padding."""
        tokens = logits.argmax(-1)
        return tokens[batch["attention_mask"].numpy() != 0] if "attention_mask" in batch else tokens

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        """The metric of each segment."""
        return [f"{self.metric} {self.score(row[None]):.4g}" for row in self.per_example(logits, labels)]

    def token_stream(self, texts: Sequence[str], *, lines: bool) -> np.ndarray:
        """Tokenize texts as one sequence of ids `[tokens]`, int32: 4 bytes per token, where a Python list needs 36.

        Args:
            texts: lines of a text, or texts that are separated by the end token.
            lines: whether the texts are lines.
        """
        end = None if lines else self._tokenizer.eos_token_id
        if end is None:
            size = self.joined_rows
            chunks = (texts[start : start + size] for start in range(0, len(texts), size))
            texts = ["".join(f"{line}\n" for line in chunk) for chunk in chunks]
        ends = [] if end is None else [end]
        groups = (texts[start : start + _TEXTS_PER_CALL] for start in range(0, len(texts), _TEXTS_PER_CALL))
        return self._join_chunks([np.array([*row, *ends], np.int32) for group in groups for row in self._ids(group)])

    def _check_vocabulary(self, texts: Sequence[str], ids: np.ndarray, source: str) -> None:
        """Raise InputError if the tokenizer does not know the text; this class accepts any text."""

    def _segment_bounds(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of each segment of a text in which a token can be predicted."""
        starts = np.arange(0, max(0, tokens - 1), self._segment_length)
        return starts, np.minimum(starts + self._segment_length, tokens)

    def _join_chunks(self, chunks: Sequence[np.ndarray]) -> np.ndarray:
        """Concatenate the ids of consecutive chunks."""
        return np.concatenate(chunks) if chunks else np.empty(0, np.int32)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        with quiet_transformers():
            ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def _slice_rows(ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Dataset:
    """Examples from slices of `ids` between `starts` and `ends`, built without Python lists."""
    lengths = ends - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    flat = np.concatenate([ids[start:end] for start, end in zip(starts, ends, strict=True)])
    slices = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat))
    return Dataset(pa.table({"input_ids": slices, "length": pa.array(lengths)}))


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed loss in nats and number of predicted tokens of each example, `[batch, 2]` float64.

    Args:
        logits: `[batch, position, vocabulary]`.
        targets: the token that each position predicts, `[batch, position]`; -100 is ignored.
    """
    sums = [
        torch.nn.functional.cross_entropy(scores.float(), row, ignore_index=-100, reduction="none").double().sum()
        for scores, row in zip(logits, targets, strict=True)  # a float32 copy of the batch may not fit
    ]
    return torch.stack([torch.stack(sums), (targets != -100).sum(1).double()], dim=1)
