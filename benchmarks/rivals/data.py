"""The rows of a set, as each row of the table reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.quantization import starting_model
from benchmarks.text_sets import SETS, rows_file
from compressor.config.sections import RowsConfig
from compressor.model_folder import load
from compressor.tasks import Data, open_data

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs of every model here, in the order of its forward."""
Feeds = Mapping[str, np.ndarray]
"""Inputs of one batch by name, int64 `[rows, tokens]`."""


def open_set(name: str, root: Path) -> Data:
    """The encoded rows of a set.

    Args:
        name: key of `SETS`.
        root: folder of the set.
    """
    chosen = SETS[name]
    request = RowsConfig(data=str(rows_file(name, root)), max_length=chosen.max_length, metric=chosen.metric)
    return open_data(request, load(starting_model(name, root)))


def calibration_rows(name: str, root: Path, rows: int, tokens: int | None = None) -> list[dict[str, np.ndarray]]:
    """Training rows drawn at random, each a batch of its own without padding.

    Args:
        name: key of `SETS`.
        root: folder of the set.
        rows: number of rows.
        tokens: maximum number of tokens of all rows together; None: no maximum.
    """
    return list(_up_to(tokens, _draw(open_set(name, root), rows)))


def _draw(data: Data, rows: int) -> Iterator[dict[str, np.ndarray]]:
    for index in np.random.default_rng(0).permutation(len(data.train))[:rows].tolist():
        batch = data.task.collate([data.train[index]])
        yield {name: batch[name] for name in INPUTS}


def _up_to(tokens: int | None, batches: Iterator[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    total = 0
    for batch in batches:
        total += batch["input_ids"].size
        if tokens is not None and total > tokens:
            return
        yield batch


def join_equal_lengths(batches: Iterable[Feeds]) -> list[dict[str, np.ndarray]]:
    """Larger batches without padding, one for each length, for tools that start a runtime for each batch."""
    by_length: dict[int, list[Feeds]] = {}
    for batch in batches:
        by_length.setdefault(batch["input_ids"].shape[1], []).append(batch)
    return [
        {name: np.concatenate([batch[name] for batch in same_length]) for name in INPUTS}
        for same_length in by_length.values()
    ]


def random_feeds(batch: int, length: int) -> dict[str, np.ndarray]:
    """A batch `[batch, length]` of random tokens without padding, to time and to weigh engines with."""
    ids = np.random.default_rng(0).integers(1000, 30000, (batch, length))
    return dict(zip(INPUTS, (ids, np.ones_like(ids), np.zeros_like(ids)), strict=True))


def output_names(name: str) -> tuple[str, ...]:
    """Names of the outputs of the model of a set, a key of `SETS`."""
    return ("start_logits", "end_logits") if "QuestionAnswering" in SETS[name].auto_class.__name__ else ("logits",)


class PositionalModel(torch.nn.Module):
    """A model that takes `INPUTS` by position and returns a dictionary of outputs, as exported programs can.

    Args:
        model: a model of transformers.
        outputs: names of the outputs that it returns.
    """

    def __init__(self, model: torch.nn.Module, outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.outputs = model, tuple(outputs)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Outputs by name, from inputs `[rows, tokens]`."""
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        return {name: outputs[name] for name in self.outputs}
