"""Scoring a task over a data set, whatever runs the model: PyTorch or a built engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from datasets import Dataset
from torch import Tensor

from compressor.tasks.base import Forward, Task


def batches(task: Task, examples: Dataset, batch_size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Batches of rows of like length, longest first, with each row's index in `examples`."""
    for indices in _grouped(examples, batch_size):
        yield indices, task.collate([examples[index] for index in indices])


def statistics(
    task: Task,
    examples: Dataset,
    forward: Forward,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """`Task.measure` of every row, `[examples, k]`, in the order of `examples`.

    Args:
        task: collates the rows and measures them.
        examples: encoded rows.
        forward: runs one batch.
        batch_size: rows a batch.
        progress: is told the number of rows done after each batch.
    """
    order: list[int] = []
    found = []
    for indices in _grouped(examples, batch_size):
        found.append(task.measure(forward, [examples[index] for index in indices]))
        order += indices
        if progress is not None:
            progress(len(indices))
    return np.concatenate(found)[np.argsort(order)]


def _grouped(examples: Dataset, batch_size: int) -> Iterator[list[int]]:
    """Rows of like length leave little padding; longest first, so that what does not fit in memory fails at once."""
    order = np.argsort(-np.asarray(examples["length"]), kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size].tolist()
