"""The fields of a report that a run and a later build of its engine measure. They need no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compressor import report as reports
from compressor.engines.build import Variant
from compressor.environment import machine
from compressor.results import (
    AnsweredRow,
    BudgetRow,
    DropStatus,
    EmbeddingAgreement,
    MissingTarget,
    Proof,
    Refusal,
    Score,
    SiteBlocks,
    keeps_metric,
)
from compressor.run.measure import Measurements
from graph_passes import Plan


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


def measured_fields(
    plan: Plan,
    compressed: Variant,
    evaluated: EvaluationResult,
    measured: Measurements,
    *,
    proofs: tuple[Proof, ...],
    drop_status: DropStatus,
    refused: tuple[Refusal, ...],
    blocks: tuple[SiteBlocks, ...],
    max_drop: float | None,
    missing: MissingTarget | None = None,
    budget: tuple[BudgetRow, ...] = (),
) -> dict[str, Any]:
    """The fields of a report that state what was measured on this machine, and the verdict.

    Args:
        plan: the plan, as it was carried out.
        compressed: the variant of the plan.
        evaluated: the metric of both variants, and their answers to a few rows.
        measured: times, sizes and memory of both variants.
        proofs: comparisons of the graphs and engines of the run.
        drop_status: whether the metric fell by more than `max_drop`.
        refused: sites that could not be shrunk.
        blocks: sites from which blocks were to be dropped.
        max_drop: the loss of the metric that the run allows; None: any.
        missing: the requested target, if this machine lacks it.
        budget: what the plan was allowed to cost, and what it costs.
    """
    results: dict[str, Any] = {
        "plan": plan,
        "dense": measured.facts["dense"],
        "compressed": measured.facts["compressed"],
        "speeds": measured.speeds,
        "speeds_over_rewritten": measured.speeds_over_rewritten,
        "scores": evaluated.scores,
        "proofs": proofs,
        "drop_status": drop_status,
        "refused": refused,
        "blocks": blocks,
        "missing": missing,
        "budget": budget,
    }
    return {
        **results,
        "verdict": reports.verdict(**results, max_drop=max_drop),
        "throughputs": measured.throughputs,
        "embeddings": evaluated.embeddings,
        "answers": evaluated.answers,
        "session": dict(compressed.engine.session),
        "machine": machine(),
    }


def drop_status(max_drop: float | None, scores: Sequence[Score]) -> DropStatus:
    """Whether the metric of test rows fell by no more than `max_drop`, in its own unit; None: it is not checked."""
    if max_drop is None:
        return DropStatus.NOT_CHECKED
    return DropStatus.PASSED if keeps_metric(scores, max_drop) else DropStatus.FAILED
