"""Batches and samples of examples, and their statistics, computed by a model or an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from datasets import Dataset

from compressor.graph.signature import GeneratingForward, RunsArrays
from compressor.progress import ProgressCallback, ignore_progress
from compressor.tasks.base import Batch, Forward, Task

BATCH_SIZE = 32
"""Examples of a batch in which examples are scored."""


def batches(task: Task, examples: Dataset, batch_size: int = BATCH_SIZE) -> Iterator[tuple[list[int], Batch]]:
    """Collated batches of examples of similar length, longest first, with the index of each example."""
    for indices in indices_by_length(examples, batch_size):
        yield indices, task.collate([examples[index] for index in indices])


def statistics(
    task: Task,
    examples: Dataset,
    forward: Forward,
    batch_size: int = BATCH_SIZE,
    on_progress: ProgressCallback = ignore_progress,
) -> np.ndarray:
    """`Task.measure` of all examples in their order, `[examples, k]`, summarized by `Task.summarize`."""
    order: list[int] = []
    measured = []
    for indices in indices_by_length(examples, batch_size):
        measured.append(task.measure(forward, [examples[index] for index in indices]))
        order += indices
        on_progress(len(order), len(examples))
    return task.summarize(np.concatenate(measured)[np.argsort(order)])


def indices_by_length(examples: Dataset, batch_size: int) -> Iterator[list[int]]:
    """Indices of batches of examples of similar length, which need little padding.

    The longest examples come first, so that the first batch shows a lack of memory.
    """
    order = np.argsort(-np.asarray(examples["length"][:]), kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size].tolist()


def forward_of(task: Task, model: Any) -> Forward:
    """A function that runs a batch with a model on arrays or in PyTorch, or that generates with a PyTorch model."""
    if isinstance(model, RunsArrays):
        return lambda batch: task.logits(task.scored_outputs(model.run(batch), batch))
    import torch

    from compressor.models.forwards import forward_arguments, tensors_of

    def forward(batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return task.logits(model(**forward_arguments(model, tensors_of(batch))))

    model.eval()
    return GeneratingForward(forward, lambda _: model)


def sample_of(task: Task, examples: Dataset, count: int, seed: int) -> Dataset:
    """A sample of examples by which models are compared, drawn at random.

    The first examples are taken if the task reads them in order, and all if the metric needs groups of examples.
    """
    if task.in_order:
        return examples.select(range(min(len(examples), count)))
    if task.set_aside_by is not None:
        return examples
    return draw_rows(examples, count, seed)


def draw_rows(rows: Dataset, count: int, seed: int) -> Dataset:
    """Draw examples at random, and keep their order; all examples if they are at most `count`."""
    return rows if len(rows) <= count else rows.select(draw_indices(len(rows), count, seed))


def draw_indices(rows: int, count: int, seed: int, together: int = 1) -> np.ndarray:
    """Draw indices of at least `count` of more rows at random, in whole groups of consecutive rows, and sort them."""
    groups, drawn = -(-rows // together), -(-count // together)
    firsts = together * np.sort(np.random.default_rng(seed).choice(groups, drawn, replace=False, shuffle=False))
    numbers = (firsts[:, None] + np.arange(together)).ravel()
    return numbers[numbers < rows]
