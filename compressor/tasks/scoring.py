"""Batches and samples of a data set, and the statistics of its rows, from a PyTorch model or an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from datasets import Dataset
from torch import Tensor

from compressor.tasks.base import Forward, Task
from compressor.tasks.data import draw_rows

BATCH_SIZE = 32
"""Rows of a batch in which rows are scored."""


def batches(
    task: Task, examples: Dataset, batch_size: int = BATCH_SIZE
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Collated batches of rows of similar length, longest first, with the index of each row in `examples`."""
    for indices in rows_by_length(examples, batch_size):
        yield indices, task.collate([examples[index] for index in indices])


def statistics(
    task: Task,
    examples: Dataset,
    forward: Forward,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """`Task.measure` of every row in the order of `examples`, `[examples, k]`, summarized by `Task.summarize`.

    Args:
        task: collates the rows and measures them.
        examples: encoded rows.
        forward: runs one batch.
        batch_size: rows per batch.
        progress: called after each batch with its number of rows.
    """
    order: list[int] = []
    measured = []
    for indices in rows_by_length(examples, batch_size):
        measured.append(task.measure(forward, [examples[index] for index in indices]))
        order += indices
        if progress is not None:
            progress(len(indices))
    return task.summarize(np.concatenate(measured)[np.argsort(order)])


def rows_by_length(examples: Dataset, batch_size: int) -> Iterator[list[int]]:
    """Row numbers of batches of similar length, which need little padding.

    The longest rows come first, so that a lack of memory shows in the first batch.
    """
    order = np.argsort(-np.asarray(examples["length"][:]), kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size].tolist()


def compares_answers(task: Task) -> bool:
    """Whether answers of two engines are compared one by one: the task defines `answer_ids`."""
    return type(task).answer_ids is not Task.answer_ids


def sample_of(task: Task, examples: Dataset, count: int, seed: int) -> Dataset:
    """Rows that stand for all where models are compared: drawn at random; all if there are no more than `count`.

    Of rows that are read in order these are the first ones. Rows that only have a metric together are all taken.

    Args:
        task: what the rows are for.
        examples: encoded rows.
        count: number of rows to draw.
        seed: seed of the draw.
    """
    if task.in_order:
        return examples.select(range(min(len(examples), count)))
    if task.set_aside_by is not None:
        return examples
    return draw_rows(examples, count, seed)


def uninformed_text(metric: str, dense: float, constant: float | None, split: str) -> str | None:
    """Why a metric can show no loss: the whole model is no better than one answer for all rows; None: it is better.

    Args:
        metric: name of the metric.
        dense: the metric of the whole model.
        constant: that of an answer that is the same for every row; None: there is none.
        split: the rows that were scored.
    """
    if constant is None or dense > constant or math.isnan(dense) or math.isnan(constant):
        return None
    return (
        f"{metric}: the whole model scores {dense:.4g} on the {split} rows, no better than the same answer for every"
        f" row ({constant:.4g}); check that these rows are of the task that the model learned, and that their labels"
        " have the order of its classes"
    )
