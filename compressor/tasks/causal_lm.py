"""Plain text, and the next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from compressor.errors import InputError
from compressor.folder import ModelFolder
from compressor.folder.inputs import token_limit
from compressor.quiet import quiet_transformers
from compressor.tasks.base import DataRequest, Task
from compressor.tasks.columns import text_column
from compressor.tasks.metrics import perplexity


class CausalLM(Task):
    """Perplexity over blocks of equal length, cut from the rows' concatenation.

    The rows are the lines of a text, joined by line ends again, or the rows of one column, joined by the end token. A
    block's first token is only read, as there is nothing before it to predict it from; the last, shorter block is kept
    if anything can be predicted in it.

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
        """Text to blocks; `labels` are the block's own ids, which the model shifts."""
        name = text_column(rows, self._columns, source)
        ids = self._stream(list(rows[name]), lines=rows.column_names == ["text"])
        blocks = self._cut(ids, source)
        if not blocks:
            raise InputError(f"{source}: holds {len(ids)} token, nothing can be predicted; give more text")
        masks = [[1] * len(block) for block in blocks]
        lengths = [len(block) for block in blocks]
        return Dataset.from_dict({"input_ids": blocks, "attention_mask": masks, "labels": blocks, "length": lengths})

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`[batch, block]`; a shorter block is padded, its padding masked and without a label (-100)."""
        longest = max(len(example["input_ids"]) for example in examples)
        fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            name: torch.tensor([list(row[name]) + [fill] * (longest - len(row[name])) for row in examples])
            for name, fill in fills.items()
        }

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Summed loss in nats and predicted tokens of each block, from logits `[batch, block, vocabulary]`."""
        return summed_loss(torch.from_numpy(logits[:, :-1]), torch.from_numpy(labels[:, 1:])).numpy()

    def score(self, statistics: np.ndarray) -> float:
        """Perplexity over rows of (loss, tokens)."""
        return perplexity(statistics[:, 0], statistics[:, 1])

    def _cut(self, ids: list[int], source: str) -> list[list[int]]:
        """The text as rows, each with something to predict in it."""
        blocks = [ids[start : start + self._block] for start in range(0, len(ids), self._block)]
        return [block for block in blocks if len(block) > 1]

    def _stream(self, texts: list[str], *, lines: bool) -> list[int]:
        """All texts as one sequence of ids."""
        with quiet_transformers():
            if lines:
                # Chunks of lines, so that no tokenizer sees the whole file at once.
                starts = range(0, len(texts), 1000)
                texts = ["".join(f"{line}\n" for line in texts[start : start + 1000]) for start in starts]
            rows = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        end = [] if lines or self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        return [token for row in rows for token in [*row, *end]]


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
