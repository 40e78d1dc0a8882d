"""Scoring a task over a data set, whatever runs the model: PyTorch or a built engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from datasets import Dataset
from torch import Tensor

from compressor.tasks.base import Task

Forward = Callable[[dict[str, Tensor]], np.ndarray]
"""A batch without labels to logits, `[batch, ...]`."""


def batches(task: Task, examples: Dataset, batch_size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Batches of rows of like length, longest first, with each row's index in `examples`.

    Sorting leaves little padding; longest first, so that what does not fit in memory fails at once.
    """
    lengths = np.asarray(examples["length"])
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size].tolist()
        yield indices, task.collate([examples[index] for index in indices])


def statistics(
    task: Task,
    examples: Dataset,
    forward: Forward,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """`Task.per_example` of every row, `[examples, 2]`, in the order of `examples`.

    Args:
        task: collates the rows and reads the logits.
        examples: encoded rows.
        forward: runs one batch.
        batch_size: rows a batch.
        progress: is told the number of rows done after each batch.
    """
    found = np.empty((len(examples), 2), dtype=np.float64)
    for indices, batch in batches(task, examples, batch_size):
        labels = batch.pop("labels").numpy()
        found[indices] = task.per_example(forward(batch), labels)
        if progress is not None:
            progress(len(indices))
    return found
