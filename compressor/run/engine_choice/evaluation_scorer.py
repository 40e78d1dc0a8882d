"""The metric of engines on the evaluation rows, in comparison with the dense engine's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from torch import Tensor

from compressor.config.run import Recipe
from compressor.results import Score, is_within, loss_of
from compressor.run import run_notes
from compressor.run.evaluate import answer, score, statistics_of
from compressor.run.products import ScoredAnswers, Variant
from compressor.run.run_log import RunLog
from compressor.tasks import Data
from compressor.tasks.scoring import compares_answers, sample_of

_COMPARED_ROWS = 2_000
"""Number of evaluation rows on which engines are compared, where there are more."""
_DECIDING_ROWS = 10_000
"""Number of evaluation rows where a rung of a ladder is chosen by the interval of its loss: with 2,000 rows it is wider
than a point if 6% of all answers change."""


@dataclass(frozen=True)
class EvaluationScorer:
    """Scores engines on the evaluation rows; the dense engine once for all of them.

    Attributes:
        dense: the dense variant, to compare with.
        data: the rows; None: every engine keeps the metric.
        recipe: the loss allowed, the number of parallel streams, and the seed of the draw of rows.
        log: receives the stages.
    """

    dense: Variant
    data: Data | None
    recipe: Recipe
    log: RunLog

    def measure(self, variant: Variant, label: str) -> ScoredAnswers | None:
        """The answers of an engine to the rows by which engines are compared.

        None where these have no labels and answers are not compared one by one.

        Args:
            variant: its variant.
            label: what its stage calls it.
        """
        return None if self._rows is None else self._measure(variant, label, self._rows)

    def compare(self, scored: ScoredAnswers | None) -> dict[str, Any]:
        """The fields of a `Candidate` that describe its metric, where rows have labels, and its equal answers."""
        if self.data is None or scored is None or (dense := self.dense_answers) is None:
            return {}
        if not self.data.scores_eval:
            return {"agreement": agreement(dense, scored)}
        task, max_drop = self.data.task, self.recipe.selection.max_drop
        metric, reference = task.score(scored.statistics), task.score(dense.statistics)
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

        Its interval decides, so that more rows are scored than where engines are compared.

        Args:
            variant: the variant of the engine.
            scored: its answers to the rows by which engines are compared, if they are known.

        Raises:
            DivergedError: the metric of a variant is not finite.
        """
        if self.data is None or self._rows is None or not self.data.scores_eval:
            return ()
        task, seed = self.data.task, self.recipe.selection.seed
        rows = sample_of(task, self.data.eval, _DECIDING_ROWS, seed)
        if len(rows) == len(self._rows) and self.dense_answers is not None:
            dense, compressed = self.dense_answers, scored or self._measure(variant, variant.name, rows)
        else:
            dense, compressed = (self._measure(each, each.name, rows) for each in (self.dense, variant))
        measured = score(dense.statistics, compressed.statistics, task, "eval", len(rows), seed)
        constant = task.constant_score(dense.statistics)
        order = task.order_text(dense.statistics, "evaluation")
        self.log.add_notes(run_notes.score_notes(measured, dense.statistics, compressed.statistics, constant, order))
        return (measured,)

    @functools.cached_property
    def dense_answers(self) -> ScoredAnswers | None:
        """The answers of the dense engine to the rows by which engines are compared; None: none are compared."""
        if self._rows is None:
            return None
        return self._measure(self.dense, "dense", self._rows)

    def _measure(self, variant: Variant, label: str, rows: Dataset) -> ScoredAnswers:
        """The answers of an engine to rows, and their statistics where the rows have labels."""
        assert self.data is not None
        task, batch_size = self.data.task, self.recipe.selection.batch_size
        answers: list[np.ndarray] = []

        def keep_answers(logits: np.ndarray, batch: Mapping[str, Tensor]) -> None:
            if (ids := task.answer_ids(logits, batch)) is not None:
                answers.append(ids.ravel())

        if not self.data.scores_eval:
            with self.log.stage(f"{label}: answering the evaluation rows") as on_progress:
                answer(variant, task, rows, on_progress, keep_answers)
            return ScoredAnswers(np.empty((0, 0)), np.concatenate(answers))
        with self.log.stage(f"{label}: scoring on the evaluation rows") as on_progress:
            statistics = statistics_of(variant, self.data, batch_size, on_progress, rows=rows, on_logits=keep_answers)
        return ScoredAnswers(statistics, np.concatenate(answers) if answers else None)

    @functools.cached_property
    def _rows(self) -> Dataset | None:
        """The evaluation rows by which engines are compared; None where nothing can be compared on them."""
        if self.data is None:
            return None
        if not self.data.scores_eval and not (len(self.data.eval) and compares_answers(self.data.task)):
            return None
        return sample_of(self.data.task, self.data.eval, _COMPARED_ROWS, self.recipe.selection.seed)


def agreement(expected: ScoredAnswers | None, scored: ScoredAnswers | None) -> float | None:
    """Share of the answers that are equal; None where they are not compared."""
    if expected is None or scored is None or expected.ids is None or scored.ids is None:
        return None
    return float((expected.ids == scored.ids).mean()) if expected.ids.shape == scored.ids.shape else None
