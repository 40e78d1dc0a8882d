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
from compressor.results import is_within, loss_of
from compressor.run.evaluate import statistics_of
from compressor.run.products import Variant
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

    @functools.cached_property
    def _reference(self) -> tuple[float, np.ndarray | None]:
        """Metric and answers of the dense engine."""
        return self._measure(self.dense, "dense")

    def score(self, variant: Variant, label: str) -> dict[str, Any]:
        """The fields of a `Candidate` that describe its metric; empty where no evaluation rows have labels.

        Args:
            variant: the candidate.
            label: what its stage calls it.
        """
        if self.data is None or not self.data.scores_eval:
            return {}
        reference, answers = self._reference
        metric, own_answers = self._measure(variant, label)
        max_drop = self.recipe.selection.max_drop
        loss = loss_of(metric - reference, higher_is_better=self.data.task.higher_is_better)
        return {
            "metric": metric,
            "difference": metric - reference,
            "unit": self.data.task.metric_unit,
            "agreement": _agreement(answers, own_answers),
            "holds": max_drop is None or is_within(loss, max_drop),
        }

    def _measure(self, variant: Variant, label: str) -> tuple[float, np.ndarray | None]:
        """Metric and answers on the evaluation rows; None: the answers of the task are not compared."""
        assert self.data is not None
        task, batch_size = self.data.task, self.recipe.selection.batch_size
        answers: list[np.ndarray] = []

        def keep_answers(logits: np.ndarray, batch: Mapping[str, Tensor]) -> None:
            if (ids := task.answer_ids(logits, batch)) is not None:
                answers.append(ids.ravel())

        with self.log.stage(f"{label}: scoring on the evaluation rows") as on_progress:
            statistics = statistics_of(
                variant, self.data, batch_size, on_progress, rows=self._scored, on_logits=keep_answers
            )
        return task.score(statistics), np.concatenate(answers) if answers else None

    @functools.cached_property
    def _scored(self) -> Dataset:
        """The evaluation rows by which engines are compared."""
        assert self.data is not None
        return sample_of(self.data.task, self.data.eval, _SCORED_ROWS, self.recipe.selection.seed)


def _agreement(expected: np.ndarray | None, answers: np.ndarray | None) -> float | None:
    """Share of the answers that are equal; None where they are not compared."""
    if expected is None or answers is None or expected.shape != answers.shape:
        return None
    return float((expected == answers).mean())
