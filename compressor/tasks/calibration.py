"""Calibration rows: training rows with the lengths of the rows that the engine will get."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from datasets import Dataset

from compressor.targets.base import Feeds
from compressor.tasks import Data, Task
from compressor.tasks.scoring import BATCH_SIZE

COMPARED_TOKENS = 8192
"""Tokens on which two models that generate are compared.

Examples stay whole, since tokens at the beginning of a text have little context. Few long examples suffice: for a Llama
of 5 million parameters with 15% fewer neurons, on WikiText-2, the standard error of the mean divergence is 3 to 4% of
it with eight examples of 1,024 tokens, and 2.5% with 64 of 128 tokens.
"""


def draw_rows(data: Data, count: int, seed: int) -> list[int]:
    """At most `count` indices of training rows with the lengths of the evaluation rows.

    For each row a length is drawn from the evaluation rows, and a training row of the nearest length is drawn, so that
    statistics are taken on inputs such as those that the engine will get.
    """
    train, rng = data.train, np.random.default_rng(seed)
    order = rng.permutation(len(train))
    lengths = np.asarray(train["length"][:])[order]
    order, lengths = order[np.argsort(lengths, kind="stable")], np.sort(lengths, kind="stable")
    drawn = rng.choice(np.asarray(data.eval["length"][:] if len(data.eval) else lengths), min(count, len(train)))
    values, starts, counts = np.unique(lengths, return_index=True, return_counts=True)
    taken = np.zeros_like(counts)
    rows: list[int] = []
    for length in drawn:
        nearest = int(np.argmin(np.where(taken < counts, np.abs(values - length), np.inf)))
        rows.append(int(order[starts[nearest] + taken[nearest]]))
        taken[nearest] += 1
    return rows


def within_tokens(data: Data, rows: list[int], tokens: int) -> list[int]:
    """The first of drawn training rows that have at most a number of tokens together, but at least one row."""
    totals = np.cumsum(np.asarray(data.train["length"][:])[rows])
    return rows[: max(1, int(np.searchsorted(totals, tokens, side="right")))]


def compared_rows(task: Task, examples: Dataset, most: int) -> int:
    """Number of examples on which the answers of two models are compared, at most `most`.

    A model that generates has an answer at every token, so few examples suffice.
    """
    if not task.generates or not len(examples):
        return most
    return min(most, math.ceil(COMPARED_TOKENS / np.mean(examples["length"][:])))


def calibration_rows(data: Data, count: int, seed: int) -> list[Feeds]:
    """Training rows with the lengths of the evaluation rows, each as a batch of one; see `draw_rows`."""
    batches = (data.task.collate([data.train[row]]) for row in draw_rows(data, count, seed))
    label = data.task.label_name
    return [{name: array for name, array in batch.items() if name != label} for batch in batches]


def calibration_batches(data: Data, rows: list[int]) -> list[Mapping[str, np.ndarray]]:
    """Batches of training rows of similar lengths, so that little is padded, without labels of a task's own kind."""
    task, lengths = data.task, data.train["length"][:]
    ordered = sorted(rows, key=lambda row: int(lengths[row]))
    parts = (ordered[start : start + BATCH_SIZE] for start in range(0, len(ordered), BATCH_SIZE))
    return [task.model_inputs(task.collate([data.train[row] for row in part])) for part in parts]
