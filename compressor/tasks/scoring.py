"""Batches and samples of examples, and their statistics, computed by a PyTorch model or an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compressor.silence_libraries import quiet_hub
from compressor.tasks.base import Forward, Task
from compressor.tasks.data import draw_rows
from compressor.tasks.forwards import LABELS, forward_arguments

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


def with_answers(task: Task, examples: Dataset, model: PreTrainedModel) -> Dataset | None:
    """Examples whose labels are the answers of a model, so that the metric of another is its agreement with it.

    Args:
        task: what the examples are for.
        examples: encoded rows, whose labels are placeholders.
        model: the model.

    Returns:
        The examples; None where the task has no labels that make answers right (`Task.labels_of`).
    """
    labels: list[Any] = [None] * len(examples)
    model.eval()
    for indices in indices_by_length(examples, BATCH_SIZE):
        rows = [examples[index] for index in indices]
        batch = task.collate(rows)
        task.pop_labels(batch, len(rows))
        with torch.no_grad():
            answers = task.labels_of(task.logits(model(**forward_arguments(model, batch))), rows)
        if answers is None:
            return None
        for index, answer in zip(indices, answers, strict=True):
            labels[index] = answer
    with quiet_hub():  # a column is added to a copy, with a progress bar
        return examples.remove_columns(LABELS).add_column(LABELS, labels)


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
