"""Batches and samples of examples, and their statistics, computed by a PyTorch model or an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from datasets import Dataset
from torch import Tensor

from compressor.tasks.base import Forward, Task
from compressor.tasks.data import draw_rows

BATCH_SIZE = 32
"""Examples of a batch in which examples are scored."""


def batches(
    task: Task, examples: Dataset, batch_size: int = BATCH_SIZE
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Collated batches of examples of similar length, longest first, with the index of each example."""
    for indices in indices_by_length(examples, batch_size):
        yield indices, task.collate([examples[index] for index in indices])


def statistics(
    task: Task,
    examples: Dataset,
    forward: Forward,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """`Task.measure` of all examples in their order, `[examples, k]`, summarized by `Task.summarize`.

    Args:
        task: collates and measures examples.
        examples: the examples.
        forward: runs a batch.
        batch_size: examples of a batch.
        progress: called after each batch with its number of examples.
    """
    order: list[int] = []
    measured = []
    for indices in indices_by_length(examples, batch_size):
        measured.append(task.measure(forward, [examples[index] for index in indices]))
        order += indices
        if progress is not None:
            progress(len(indices))
    return task.summarize(np.concatenate(measured)[np.argsort(order)])


def indices_by_length(examples: Dataset, batch_size: int) -> Iterator[list[int]]:
    """Indices of batches of examples of similar length, which need little padding.

    The longest examples come first, so that the first batch shows a lack of memory.
    """
    order = np.argsort(-np.asarray(examples["length"][:]), kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size].tolist()


def compares_answers(task: Task) -> bool:
    """Whether single answers of engines are compared: the task defines `answer_ids`."""
    return type(task).answer_ids is not Task.answer_ids


def sample_of(task: Task, examples: Dataset, count: int, seed: int) -> Dataset:
    """A sample of examples by which models are compared, drawn at random.

    The first examples are taken if the task reads them in order, and all if the metric needs groups of examples.

    Args:
        task: the task that reads the examples.
        examples: the examples.
        count: number of examples to draw.
        seed: seed of the draw.
    """
    if task.in_order:
        return examples.select(range(min(len(examples), count)))
    if task.set_aside_by is not None:
        return examples
    return draw_rows(examples, count, seed)
