"""The metric of both engines on the test rows, and their answers to a few of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from compressor.config.run import Recipe
from compressor.engines.build import Variant
from compressor.engines.score import forward_of, metric_sums_of, reads_in_order, score, score_notes
from compressor.progress import RunLog
from compressor.results import AnsweredRow, EmbeddingAgreement, Score
from compressor.run.answered_rows import answered_rows, embedded_rows
from compressor.run.embeddings import agreement_note, agreement_of
from compressor.tasks import Data


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
    sums, logits = [], []
    for variant in variants:
        parts: list[np.ndarray] = []
        with log.stage(f"{variant.name}: scoring on the test rows") as on_progress:
            on_logits = (lambda values, _, kept=parts: kept.append(values)) if data.task.embeds else None
            sums.append(metric_sums_of(variant, data, selection.batch_size, on_progress, on_logits=on_logits))
        logits.append(parts)
    dense, compressed = sums
    scores = (score(dense, compressed, data.task, "test", len(data.test), selection.seed),)
    constant, order = data.task.constant_score(dense), data.task.order_text(dense, "test")
    log.add_notes(score_notes(scores[0], dense, compressed, constant, order))
    if data.task.embeds:
        agreement = agreement_of(logits[0], logits[1], data)
        log.add_notes([agreement_note(agreement)])
        return EvaluationResult(scores, agreement, embedded_rows(logits[0], logits[1], data, count) if count else ())
    if not count or any(reads_in_order(variant, data.task) for variant in variants):
        return EvaluationResult(scores)
    with log.stage("comparing answers"):
        forwards = [forward_of(variant, data.task) for variant in variants]
        return EvaluationResult(scores, answers=answered_rows(forwards, sums, data, count))
