"""Plain text, and the next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressor.errors import InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.example_inputs import token_limit
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import DataRequest, Task
from compressor.tasks.columns import text_column
from compressor.tasks.metrics import perplexity

_CHUNK, _GROUP = 1000, 64
"""Lines of a chunk, and chunks or rows that are tokenized at a time."""


class CausalLM(Task):
    """Perplexity over blocks of equal length, cut from the rows' concatenation.

    The rows are the lines of a text, joined by line ends again, or the rows of one column, joined by the end token (by
    line ends where the tokenizer has none). A block's first token is only read, as there is nothing before it to
    predict it from; the last, shorter block is kept if anything can be predicted in it.

    Args:
        folder: its tokenizer makes the tokens.
        request: the text column and the length of a block.
        metric: `perplexity`.
    """

    name = "causal-lm"
    metrics: tuple[str, ...] = ("perplexity",)
    higher_is_better = False
    shortest = 2
    """Tokens of a block in which something can be predicted."""

    def __init__(self, folder: ModelFolder, request: DataRequest, metric: str) -> None:
        self.metric = metric
        self._tokenizer = folder.processor
        self._columns = request.text_columns
        limit = token_limit(folder.model)
        self._block = min(request.max_length, limit) if limit else request.max_length
        if self._block < self.shortest:
            raise InputError(f"{folder.path}: blocks of {self._block} token predict nothing; raise --max-length")

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Nothing to fix: the labels are the tokens."""

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Text to blocks: columns `input_ids` and `length`, as all else follows from them."""
        name = text_column(rows, self._columns, source)
        texts = list(rows[name])
        ids = self._stream(texts, lines=rows.column_names == ["text"])
        self._check(texts, ids, source)
        starts, ends = self._cut(len(ids))
        if not len(starts):
            raise InputError(f"{source}: holds {len(ids)} token, nothing can be predicted; give more text")
        return _rows_of(ids, starts, ends)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`[batch, block]`; `labels` are the block's own ids, which the model shifts.

        A shorter block is padded, its padding masked and without a label (-100).
        """
        blocks = [torch.as_tensor(example["input_ids"], dtype=torch.int64) for example in examples]
        ids, labels = (pad_sequence(blocks, batch_first=True, padding_value=fill) for fill in (0, -100))
        return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Summed loss in nats and predicted tokens of each block, from logits `[batch, block, vocabulary]`."""
        return summed_loss(torch.from_numpy(logits[:, :-1]), torch.from_numpy(labels[:, 1:])).numpy()

    def score(self, statistics: np.ndarray) -> float:
        """Perplexity over rows of (loss, tokens)."""
        return perplexity(statistics[:, 0], statistics[:, 1])

    def _check(self, texts: Sequence[str], ids: np.ndarray, source: str) -> None:
        """Raise InputError if `texts` are none for this model, by their ids."""

    def _cut(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the rows of a text of `tokens` start and end, each with something to predict in it."""
        starts = np.arange(0, max(0, tokens - 1), self._block)
        return starts, np.minimum(starts + self._block, tokens)

    def _stream(self, texts: Sequence[str], *, lines: bool) -> np.ndarray:
        """All texts as one sequence of ids `[tokens]` int32, which take 4 bytes each and not a list's 36."""
        end = None if lines else self._tokenizer.eos_token_id
        if end is None:  # chunks of lines, so that no tokenizer sees the whole file at once
            starts = range(0, len(texts), _CHUNK)
            texts = ["".join(f"{line}\n" for line in texts[start : start + _CHUNK]) for start in starts]
        ends = [] if end is None else [end]
        groups = (texts[start : start + _GROUP] for start in range(0, len(texts), _GROUP))
        return self._joined([np.array([*row, *ends], np.int32) for group in groups for row in self._ids(group)])

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The ids of chunks that follow each other as those of the whole text."""
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        with quiet_transformers():
            found: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return found


def _rows_of(ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Dataset:
    """The stretches of `ids` from each start to its end, as rows; no list of Python's in between."""
    lengths = ends - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    flat = np.concatenate([ids[start:end] for start, end in zip(starts, ends, strict=True)])
    held = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat))
    return Dataset(pa.table({"input_ids": held, "length": pa.array(lengths)}))


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed loss in nats and predicted tokens of each row, `[batch, 2]` float64.

    Args:
        logits: `[batch, tokens, vocabulary]`.
        targets: `[batch, tokens]`, the token that each position predicts; -100 is left out.
    """
    sums = [
        torch.nn.functional.cross_entropy(scores.float(), row, ignore_index=-100, reduction="none").double().sum()
        for scores, row in zip(logits, targets, strict=True)  # row by row: a copy of a whole batch might not fit
    ]
    return torch.stack([torch.stack(sums), (targets != -100).sum(1).double()], dim=1)
