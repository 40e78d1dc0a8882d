"""What the tasks over labelled texts share: texts to tokens, and batches padded to their longest row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from compressor.errors import InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.example_inputs import takes_segments, token_limit
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import DataRequest
from compressor.tasks.columns import text_columns


class Texts:
    """A folder's tokenizer, told which columns to read and how long a text may be.

    Raises:
        InputError: so short that nothing of a text is left.
    """

    def __init__(self, folder: ModelFolder, request: DataRequest) -> None:
        self.tokenizer = folder.processor
        self._columns = request.text_columns
        limits = (request.max_length, token_limit(folder.model), self.tokenizer.model_max_length)
        self.max_length = int(min(limit for limit in limits if limit))
        self._segments = takes_segments(folder.model, self.tokenizer)
        self._pad = folder.config.get_text_config().pad_token_id
        special = self.tokenizer.num_special_tokens_to_add(pair=True)
        if self.max_length < special + 2:
            raise InputError(
                f"{folder.path}: {self.max_length} tokens a row leave no room for text beside {special} marks; raise"
                " --max-length"
            )

    def encode(self, rows: Dataset, source: str) -> dict[str, list[Any]]:
        """Columns of tokens: `input_ids` and what else the tokenizer gives, and `length`.

        Raises:
            InputError: a column is missing or holds no text, or a row gives no token.
        """
        texts = [list(rows[name]) for name in text_columns(rows, self._columns, source)]
        with quiet_transformers():
            encoded = dict(
                self.tokenizer(
                    *texts,
                    truncation=True,
                    max_length=self.max_length,
                    return_attention_mask=True,
                    return_token_type_ids=self._segments,
                )
            )
        encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
        if 0 in encoded["length"]:
            raise InputError(f"{source}: row {encoded['length'].index(0) + 1} has no text; fill it or leave it out")
        return encoded

    def pad(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """One batch `[batch, longest]`, padded on the right whatever the tokenizer's habit."""
        longest = max(len(example["input_ids"]) for example in examples)
        fills = {"input_ids": self._pad, "attention_mask": 0}
        if self._segments:
            fills["token_type_ids"] = self.tokenizer.pad_token_type_id
        return {
            name: torch.tensor([[*row[name], *[fill] * (longest - len(row[name]))] for row in examples])
            for name, fill in fills.items()
        }
