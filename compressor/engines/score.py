"""The metric of engines on rows, in comparison with that of the dense engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import Dataset

from compressor.engines.build import Variant
from compressor.errors import DivergedError, ErrorCode
from compressor.graph.signature import GeneratingForward
from compressor.measure import paired_interval
from compressor.measure.bootstrap import uninformed_text
from compressor.progress import ProgressCallback, RunLog
from compressor.results import Note, NoteCode, Score, is_within, loss_of
from compressor.targets.segment_stream import Stream, limits
from compressor.tasks import Data, Task, statistics
from compressor.tasks.base import Batch, Forward
from compressor.tasks.causal_lm import read
from compressor.tasks.data import PURPOSES
from compressor.tasks.metrics import summed_losses
from compressor.tasks.scoring import batches, sample_of

_COMPARED_ROWS = 2_000
"""Maximum number of evaluation rows on which engines are compared."""
_DECIDING_ROWS = 10_000
"""Number of evaluation rows where a rung of a ladder is chosen by the interval of its loss: with 2,000 rows it is wider
than a point if 6% of all answers change."""

LogitsObserver = Callable[[np.ndarray, Mapping[str, np.ndarray]], None]
"""Receives the logits of a batch, and its inputs without labels."""


def reads_in_order(variant: Variant, task: Task) -> bool:
    """Whether an engine reads rows with the memory of earlier ones; without memory a segment is a row."""
    return task.reads_streams and limits(variant.graph.path) is not None


def forward_of(variant: Variant, task: Task, on_logits: LogitsObserver | None = None) -> Forward:
    """A function that runs a batch with the engine, and passes its logits on; or generates with its caches, if it has
    any."""

    def forward(batch: Batch) -> np.ndarray:
        outputs = variant.engine.run(batch)
        logits = task.logits(task.scored_outputs(outputs, batch))
        if on_logits is not None:
            on_logits(logits, batch)
        return logits

    return GeneratingForward(forward, functools.cache(variant.engine.generator))


def metric_sums_of(
    variant: Variant,
    data: Data,
    batch_size: int,
    on_progress: ProgressCallback,
    *,
    rows: Dataset | None = None,
    on_logits: LogitsObserver | None = None,
) -> np.ndarray:
    """The metric sums of an engine, `[examples, k]`; see `Task.measure`.

    Args:
        batch_size: number of parallel streams, for a task that reads texts in order.
        on_logits: called with the logits of each batch; not called by a task that reads texts in order.
    """
    rows = data.test if rows is None else rows
    if reads_in_order(variant, data.task):
        stream = Stream(variant.engine, variant.graph.path)

        def segment(ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
            return summed_losses(stream.read(ids), targets)

        return read(data.task, rows, segment, batch_size, on_progress)
    return statistics(data.task, rows, forward_of(variant, data.task, on_logits), on_progress=on_progress)


def answer(
    variant: Variant, task: Task, rows: Dataset, on_progress: ProgressCallback, on_logits: LogitsObserver
) -> None:
    """Run an engine on rows whose labels are not read."""
    forward, answered = forward_of(variant, task, on_logits), 0
    for indices, batch in batches(task, rows):
        task.pop_labels(batch, len(indices))
        forward(batch)
        on_progress(answered := answered + len(indices), len(rows))


def score(
    dense: np.ndarray, compressed: np.ndarray, task: Task, split: Literal["eval", "test"], rows: int, seed: int
) -> Score:
    """The metric of both variants, and a paired bootstrap interval of the difference.

    Args:
        dense: metric sums of the dense variant, `[examples, k]`.
        compressed: metric sums of the compressed variant for the same examples, `[examples, k]`.

    Raises:
        DivergedError: the metric of a variant is not finite.
    """
    values = {"dense": task.score(dense), "compressed": task.score(compressed)}
    for variant, value in values.items():
        if not np.isfinite(value):
            text = (
                f"{variant}: {task.metric} on {PURPOSES[split]} rows is {value}; check the weights and the labels of"
                " these rows"
            )
            raise DivergedError(text, code=ErrorCode.NOT_FINITE, quantity=task.metric, value=value)
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


def score_notes(
    score: Score, dense: np.ndarray, compressed: np.ndarray, constant: float | None, order: str | None = None
) -> Iterator[Note]:
    """Notes on what the metric of both engines cannot show.

    Args:
        dense: metric sums of the dense engine's answers, `[examples, k]`.
        compressed: those of the compressed engine for the same examples.
        constant: the score of the same answer for every row; None: there is none.
        order: why the labels seem to have another order than the classes of the model; None: they do not.
    """
    if order is not None:
        yield Note(code=NoteCode.LABELS_PERMUTED, text=f"{score.metric}: {order}")
    elif (text := uninformed_text(score.metric, score.dense, constant, score.split_name)) is not None:
        yield Note(code=NoteCode.DENSE_UNINFORMED, text=text)
    if constant is not None and np.array_equal(dense, compressed):
        changed = 1 - (1 - score.confidence) ** (1 / score.rows)
        yield Note(
            code=NoteCode.ANSWERS_UNCHANGED,
            text=f"{score.metric}: both engines give the same answers to all {score.rows} {score.split_name} rows, so"
            f" the interval has no width; on other rows up to {changed:.2%} of the answers may change"
            f" ({score.confidence:.0%} bound)",
        )


@dataclass(frozen=True)
class ScoredAnswers:
    """The answers of an engine to the evaluation rows.

    Attributes:
        sums: metric sums (`Task.measure`), `[examples, k]`; `[0, 0]` where rows have no labels.
        ids: ids of the answers, `[answers]`; None: those of the task are not compared one by one.
    """

    sums: np.ndarray
    ids: np.ndarray | None = None


@dataclass(frozen=True)
class EvaluationScorer:
    """Scores engines on the evaluation rows; the dense engine once for all of them.

    Attributes:
        dense: the dense variant, to compare with.
        data: the rows; None: every engine keeps the metric.
        log: receives the stages.
        seed: seed of the draw of rows and of the bootstrap.
        batch_size: number of parallel streams, for a task that reads texts in order.
        max_drop: the loss of the metric that is allowed; None: any.
    """

    dense: Variant
    data: Data | None
    log: RunLog
    seed: int
    batch_size: int
    max_drop: float | None = None

    def measure(self, variant: Variant, label: str) -> ScoredAnswers | None:
        """The answers of an engine to the rows by which engines are compared.

        None where these have no labels and answers are not compared one by one.
        """
        return None if self._rows is None else self._measure(variant, label, self._rows)

    def compare(self, scored: ScoredAnswers | None) -> dict[str, Any]:
        """The fields of a `Candidate` that describe its metric, where rows have labels, and its equal answers."""
        if self.data is None or scored is None or (dense := self.dense_answers) is None:
            return {}
        if not self.data.scores_eval:
            return {"agreement": agreement(dense, scored)}
        task, max_drop = self.data.task, self.max_drop
        metric, reference = task.score(scored.sums), task.score(dense.sums)
        loss = loss_of(metric - reference, higher_is_better=task.higher_is_better)
        return {
            "metric": metric,
            "difference": metric - reference,
            "unit": task.metric_unit,
            "agreement": agreement(dense, scored),
            "holds": max_drop is None or is_within(loss, max_drop),
        }

    def scores(self, variant: Variant, scored: ScoredAnswers | None = None) -> tuple[Score, ...]:
        """The metric of an engine and of the dense one with its interval, and notes on it; empty without labels.

        Its interval decides, so more rows are scored than to compare engines.

        Args:
            scored: its answers to the rows by which engines are compared, if they are known.

        Raises:
            DivergedError: the metric of a variant is not finite.
        """
        if self.data is None or self._rows is None or not self.data.scores_eval:
            return ()
        task, seed = self.data.task, self.seed
        rows = sample_of(task, self.data.eval, _DECIDING_ROWS, seed)
        if len(rows) == len(self._rows) and self.dense_answers is not None:
            dense, compressed = self.dense_answers, scored or self._measure(variant, variant.name, rows)
        else:
            dense, compressed = (self._measure(each, each.name, rows) for each in (self.dense, variant))
        measured = score(dense.sums, compressed.sums, task, "eval", len(rows), seed)
        constant = task.constant_score(dense.sums)
        order = task.order_text(dense.sums, "evaluation")
        self.log.add_notes(score_notes(measured, dense.sums, compressed.sums, constant, order))
        return (measured,)

    @functools.cached_property
    def dense_answers(self) -> ScoredAnswers | None:
        """The answers of the dense engine to the rows by which engines are compared; None: none are compared."""
        if self._rows is None:
            return None
        return self._measure(self.dense, "dense", self._rows)

    def _measure(self, variant: Variant, label: str, rows: Dataset) -> ScoredAnswers:
        """The answers of an engine to rows, and their metric sums where the rows have labels."""
        assert self.data is not None
        task = self.data.task
        answers: list[np.ndarray] = []

        def keep_answers(logits: np.ndarray, batch: Mapping[str, np.ndarray]) -> None:
            if (ids := task.answer_ids(logits, batch)) is not None:
                answers.append(ids.ravel())

        if not self.data.scores_eval:
            with self.log.stage(f"{label}: answering the evaluation rows") as on_progress:
                answer(variant, task, rows, on_progress, keep_answers)
            return ScoredAnswers(np.empty((0, 0)), np.concatenate(answers))
        with self.log.stage(f"{label}: scoring on the evaluation rows") as on_progress:
            sums = metric_sums_of(variant, self.data, self.batch_size, on_progress, rows=rows, on_logits=keep_answers)
        return ScoredAnswers(sums, np.concatenate(answers) if answers else None)

    @functools.cached_property
    def _rows(self) -> Dataset | None:
        """The evaluation rows by which engines are compared; None where nothing can be compared on them."""
        if self.data is None:
            return None
        if not self.data.scores_eval and not (len(self.data.eval) and self.data.task.compares_answers):
            return None
        return sample_of(self.data.task, self.data.eval, _COMPARED_ROWS, self.seed)


def agreement(expected: ScoredAnswers | None, scored: ScoredAnswers | None) -> float | None:
    """Share of the answers that are equal; None where they are not compared."""
    if expected is None or scored is None or expected.ids is None or scored.ids is None:
        return None
    return float((expected.ids == scored.ids).mean()) if expected.ids.shape == scored.ids.shape else None
