"""The metric of both engines on the test rows, and their answers to a few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from compressor.config.run import Recipe
from compressor.errors import DivergedError, ErrorCode
from compressor.measure import paired_interval
from compressor.progress import ProgressCallback
from compressor.results import AnsweredRow, EmbeddingAgreement, Score
from compressor.run import run_notes
from compressor.run.answered_rows import answered_rows, embedded_rows
from compressor.run.embeddings import agreement_note, agreement_of
from compressor.run.products import Variant
from compressor.run.run_log import RunLog
from compressor.targets.segment_stream import Stream, limits
from compressor.tasks import Data, Task, statistics
from compressor.tasks.base import Forward
from compressor.tasks.data import PURPOSES
from compressor.tasks.scoring import batches
from compressor.tasks.segment_streams import read


@dataclass(frozen=True)
class EvaluationResult:
    """What rows show of two engines.

    Attributes:
        scores: the metric of both on test rows, and on evaluation rows where the recipe bounds its loss; empty without
            rows.
        embeddings: how far their embeddings agree; None for other tasks.
        answers: a few rows with the answers of both.
    """

    scores: tuple[Score, ...] = ()
    embeddings: EmbeddingAgreement | None = None
    answers: tuple[AnsweredRow, ...] = ()

    def with_scores(self, scores: tuple[Score, ...]) -> EvaluationResult:
        """The result with further metrics after its own."""
        return replace(self, scores=(*self.scores, *scores))


def evaluate(variants: Sequence[Variant], data: Data | None, recipe: Recipe, log: RunLog) -> EvaluationResult:
    """Evaluate the dense and the compressed engine on the test rows, and note how far their embeddings agree.

    Args:
        variants: the dense and the compressed variant.
        data: the test rows, if there are any, and the task; None: there are no rows.
        recipe: batch size, seed of the bootstrap, and number of rows whose answers are shown.
        log: receives stages and notes.
    """
    if data is None or not len(data.test):
        return EvaluationResult()
    selection, count = recipe.selection, recipe.output.report_rows
    statistics, logits = [], []
    for variant in variants:
        parts: list[np.ndarray] = []
        with log.stage(f"{variant.name}: scoring on the test rows") as on_progress:
            on_logits = (lambda values, _, kept=parts: kept.append(values)) if data.task.embeds else None
            statistics.append(statistics_of(variant, data, selection.batch_size, on_progress, on_logits=on_logits))
        logits.append(parts)
    dense, compressed = statistics
    scores = (score(dense, compressed, data.task, "test", len(data.test), selection.seed),)
    constant, order = data.task.constant_score(dense), data.task.order_text(dense, "test")
    log.add_notes(run_notes.score_notes(scores[0], dense, compressed, constant, order))
    if data.task.embeds:
        agreement = agreement_of(logits[0], logits[1], data)
        log.add_notes([agreement_note(agreement)])
        return EvaluationResult(scores, agreement, embedded_rows(logits[0], logits[1], data, count) if count else ())
    if not count or any(_reads_in_order(variant, data.task) for variant in variants):
        return EvaluationResult(scores)
    with log.stage("comparing answers"):
        forwards = [_forward_of(variant, data.task) for variant in variants]
        return EvaluationResult(scores, answers=answered_rows(forwards, statistics, data, count))


def _reads_in_order(variant: Variant, task: Task) -> bool:
    """Whether an engine reads rows with the memory of earlier ones; without memory a segment is a row."""
    return task.reads_streams and limits(variant.graph.path) is not None


LogitsObserver = Callable[[np.ndarray, Mapping[str, Tensor]], None]
"""Receives the logits of a batch, and its inputs without labels."""


def _forward_of(variant: Variant, task: Task, on_logits: LogitsObserver | None = None) -> Forward:
    """Runs a batch with the engine, and passes its logits on."""

    def forward(batch: dict[str, Tensor]) -> np.ndarray:
        outputs = variant.engine.run({name: value.numpy() for name, value in batch.items()})
        logits = task.logits(task.scored_outputs(outputs, batch))
        if on_logits is not None:
            on_logits(logits, batch)
        return logits

    return forward


def statistics_of(
    variant: Variant,
    data: Data,
    batch_size: int,
    on_progress: ProgressCallback,
    *,
    rows: Dataset | None = None,
    on_logits: LogitsObserver | None = None,
) -> np.ndarray:
    """Sufficient statistics of the metric, `[examples, statistics]`, computed by the engine.

    Args:
        variant: the variant whose engine runs.
        data: the test rows and the task.
        batch_size: number of parallel streams, for a task that reads texts in order.
        on_progress: called with (rows scored, rows).
        rows: the rows to score; None: the test rows.
        on_logits: called with the logits of each batch; not called by a task that reads texts in order.
    """
    rows, scored = data.test if rows is None else rows, 0

    def progress(count: int) -> None:
        nonlocal scored
        on_progress(scored := scored + count, len(rows))

    if _reads_in_order(variant, data.task):
        stream = Stream(variant.engine, variant.graph.path)

        def segment(ids: Tensor) -> Tensor:
            return torch.from_numpy(stream.read(ids.numpy()))

        return read(data.task, rows, segment, batch_size, progress)
    return statistics(data.task, rows, _forward_of(variant, data.task, on_logits), progress=progress)


def answer(
    variant: Variant, task: Task, rows: Dataset, on_progress: ProgressCallback, on_logits: LogitsObserver
) -> None:
    """Run an engine on rows whose labels are not read.

    Args:
        variant: the variant whose engine runs.
        task: what the rows are for.
        rows: encoded rows.
        on_progress: called with (rows answered, rows).
        on_logits: called with the logits of each batch.
    """
    forward, answered = _forward_of(variant, task, on_logits), 0
    for indices, batch in batches(task, rows):
        task.pop_labels(batch, len(indices))
        forward(batch)
        on_progress(answered := answered + len(indices), len(rows))


def score(
    dense: np.ndarray, compressed: np.ndarray, task: Task, split: Literal["eval", "test"], rows: int, seed: int
) -> Score:
    """The metric of both variants, and a paired bootstrap interval of the difference.

    Args:
        dense: statistics of the dense variant, `[examples, statistics]`.
        compressed: statistics of the compressed variant for the same examples, `[examples, statistics]`.
        task: the task that measured them.
        split: the split of the rows.
        rows: number of rows.
        seed: seed of the bootstrap.

    Raises:
        DivergedError: the metric of a variant is not finite.
    """
    values = {"dense": task.score(dense), "compressed": task.score(compressed)}
    for variant, value in values.items():
        if not np.isfinite(value):
            raise DivergedError(
                f"{variant}: {task.metric} on {PURPOSES[split]} rows is {value}; check the weights and the labels of"
                " these rows",
                code=ErrorCode.NOT_FINITE,
                quantity=task.metric,
                value=value,
            )
    interval = paired_interval(dense, compressed, task.score, seed)
    return Score(
        metric=task.metric,
        split=split,
        rows=rows,
        **values,
        **interval._asdict(),
        higher_is_better=task.higher_is_better,
        unit=task.metric_unit,
    )
