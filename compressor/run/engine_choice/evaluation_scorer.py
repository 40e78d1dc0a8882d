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
from compressor.run.evaluate import score, statistics_of
from compressor.run.products import ScoredAnswers, Variant
from compressor.run.run_log import RunLog
from compressor.tasks import Data
from compressor.tasks.scoring import sample_of

_SCORED_ROWS = 2000
"""Number of evaluation rows that every engine is scored on, where there are more."""


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
        """The answers of an engine to the evaluation rows; None where these have no labels.

        Args:
            variant: its variant.
            label: what its stage calls it.
        """
        if self.data is None or not self.data.scores_eval:
            return None
        task, batch_size = self.data.task, self.recipe.selection.batch_size
        answers: list[np.ndarray] = []

        def keep_answers(logits: np.ndarray, batch: Mapping[str, Tensor]) -> None:
            if (ids := task.answer_ids(logits, batch)) is not None:
                answers.append(ids.ravel())

        with self.log.stage(f"{label}: scoring on the evaluation rows") as on_progress:
            statistics = statistics_of(
                variant, self.data, batch_size, on_progress, rows=self._scored_rows, on_logits=keep_answers
            )
        return ScoredAnswers(statistics, np.concatenate(answers) if answers else None)

    def compare(self, scored: ScoredAnswers | None) -> dict[str, Any]:
        """The fields of a `Candidate` that describe its metric; empty where it has no scored answers."""
        if scored is None:
            return {}
        assert self.data is not None
        assert self._reference is not None
        task, dense, max_drop = self.data.task, self._reference, self.recipe.selection.max_drop
        metric, reference = task.score(scored.statistics), task.score(dense.statistics)
        loss = loss_of(metric - reference, higher_is_better=task.higher_is_better)
        return {
            "metric": metric,
            "difference": metric - reference,
            "unit": task.metric_unit,
            "agreement": _agreement(dense.ids, scored.ids),
            "holds": max_drop is None or is_within(loss, max_drop),
        }

    def bounded_scores(self, variant: Variant, scored: ScoredAnswers | None = None) -> tuple[Score, ...]:
        """What `scores` returns, if the recipe bounds the loss of the metric; empty otherwise."""
        return () if self.recipe.selection.max_drop is None else self.scores(variant, scored)

    def scores(self, variant: Variant, scored: ScoredAnswers | None = None) -> tuple[Score, ...]:
        """The metric of an engine and of the dense one, with its interval; empty where no rows have labels.

        Args:
            variant: the variant of the engine.
            scored: its answers, if they are known.

        Raises:
            DivergedError: the metric of a variant is not finite.
        """
        scored = scored or self.measure(variant, variant.name)
        if scored is None:
            return ()
        assert self.data is not None
        assert self._reference is not None
        statistics, seed = (self._reference.statistics, scored.statistics), self.recipe.selection.seed
        return (score(*statistics, self.data.task, "eval", len(self._scored_rows), seed),)

    @functools.cached_property
    def _reference(self) -> ScoredAnswers | None:
        """The answers of the dense engine."""
        return self.measure(self.dense, "dense")

    @functools.cached_property
    def _scored_rows(self) -> Dataset:
        """The evaluation rows by which engines are compared."""
        assert self.data is not None
        return sample_of(self.data.task, self.data.eval, _SCORED_ROWS, self.recipe.selection.seed)


def _agreement(expected: np.ndarray | None, answers: np.ndarray | None) -> float | None:
    """Share of the answers that are equal; None where they are not compared."""
    if expected is None or answers is None or expected.shape != answers.shape:
        return None
    return float((expected == answers).mean())
