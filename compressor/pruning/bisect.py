"""Remove as many units as the metric allows: bisection over the time of the engine.

How much of the metric the plans of a bisection lose is estimated from all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from datasets import Dataset

from compressor.errors import ErrorCode, InputError
from compressor.measure.costs import CostTable
from compressor.progress import RunLog
from compressor.pruning.allocate import Allocation, choose_counts
from compressor.pruning.constraints import Constraint
from compressor.pruning.model import PrunableModel, ResampledScore, Scorer, Weights
from compressor.results import CertificateScope, CertifiedLoss, MetricUnit, Note, NoteCode, is_within
from compressor.selection.allocation import Curve
from compressor.selection.certified_rows import record_certificate
from compressor.selection.certify import certify, split_rows
from compressor.store import Json, Store, digest
from compressor.tasks import Data, Task
from compressor.tasks.scoring import uninformed_text

_BISECTIONS = 5
LEAST_SHARE = 0.08
"""Smallest share of the cost of the whole model that the bisection tries."""
MARGIN_ABOVE_LEAST = 1.02
"""Ratio of the smallest share that is tried to the cost of a plan that keeps nothing; no plan costs less."""
_CLOSE = 1.01
"""Ratio of two shares between which no further plan is tried."""
_COMPARABLE = 5.0
"""A plan is compared with those that diverge at most this many times as far. Beyond that losses are not in proportion:
a model that answers by chance loses no more, however far it diverges."""
MARGIN = 1.645
"""Standard errors that are added to an estimated loss: an upper bound with a confidence of 95%, one-sided."""
_ERRORS_ALONE = 2.0
"""Standard errors by which the loss that a plan itself shows may exceed what is allowed."""


class LossEstimate(NamedTuple):
    """How much of the metric a plan loses, in its unit; negative where it gains.

    Attributes:
        loss: the estimate.
        error: its standard error.
    """

    loss: float
    error: float


_NONE_LOST = LossEstimate(0.0, 0.0)
_Numbers = tuple[float, list[float], float]
_SCORE = Json[_Numbers](_Numbers)
"""Metric, draws and divergence of a `ResampledScore` in the store."""


@dataclass(frozen=True)
class LossBound:
    """What plans may lose, and the rows on which that is measured.

    Attributes:
        data: the rows; the evaluation rows are scored.
        max_drop: the loss of the metric that is allowed, in its unit.
        seed: seed of the draws.
        store: keeps the scores of plans that were tried, from which an interrupted search goes on, under keys of what
            the weights of a plan depend on.
        quantization_drop: what the whole model loses by the precision of the engine, in the unit of the metric.
        certify: confidence of a certificate of the loss; None: none is requested.
        key: what identifies the search among those that certified a loss on these rows.
    """

    data: Data
    max_drop: float
    seed: int
    store: Store
    quantization_drop: float = 0.0
    certify: float | None = None
    key: str = ""


def bisect_metric(
    model: PrunableModel,
    losses: Mapping[str, Curve],
    tables: Sequence[CostTable],
    bound: LossBound,
    log: RunLog,
) -> tuple[Allocation, CertifiedLoss | None]:
    """The fastest plan whose metric on the evaluation rows falls by no more than the loss allowed, by bisection.

    The model has the weights of the plan afterwards.

    Args:
        model: the model, with its units ranked.
        losses: name of the group -> loss at every number of units.
        tables: times at each size.
        bound: the rows and the loss allowed.
        log: receives stages and notes.

    Returns:
        The numbers of units, with their cost as a share of the whole model's time; and the loss that is certified, if a
        certificate was requested.

    Raises:
        InputError: the whole model is no better than the same answer for every row, so that no loss would show.
    """
    searched, unseen = _divided_rows(bound)
    plans, count = _bisect(model, losses, _overall(tables), bound, searched, log)
    log.add_notes([_note(plans, count, model.task)])
    certified = None
    if unseen is not None:
        certified, plans = _certify(model, plans, bound, unseen, len(searched), log)
    return _load_weights(model, plans[-1], log), certified


@dataclass(frozen=True)
class _FittedPlan:
    """Numbers of units, the weights of the model that keeps them, and how much of the metric it is expected to lose.

    A plan that an interrupted run scored has the weights of the whole model, from which it is fitted when needed.
    """

    allocation: Allocation
    weights: Weights
    is_fitted: bool = True
    loss: LossEstimate = _NONE_LOST

    @property
    def cost(self) -> float:
        """Share of the whole model's time, by the cost table."""
        return self.allocation.predicted[0]

    @property
    def units(self) -> int:
        return sum(self.allocation.counts.values())


@dataclass(eq=False)
class _Attempt:
    """A plan, the largest share of the whole model's time for which it was chosen, and how the model scores with it."""

    share: float
    plan: _FittedPlan
    score: ResampledScore


def _bisect(
    model: PrunableModel,
    losses: Mapping[str, Curve],
    table: CostTable,
    bound: LossBound,
    rows: Dataset,
    log: RunLog,
) -> tuple[list[_FittedPlan], int]:
    """The whole model and the plans that keep the metric, each faster than the one before it; and how many were tried.

    The table is of shares of the whole model's time; the metric is that of the rows.
    """
    groups, task = model.groups, model.task
    scorer = model.scorer(rows, bound.seed, log)
    dense, original = scorer.score_whole(), scorer.whole_weights
    require_informed(dense, task)
    least = max(LEAST_SHARE, MARGIN_ABOVE_LEAST * table.cost({group.name: 0 for group in groups}))
    attempts: list[_Attempt] = []
    while len(attempts) < _BISECTIONS:
        share = _next_share(attempts, _holding(bound, task, dense, attempts), least)
        if share is None:
            break
        counts = choose_counts(groups, losses, [Constraint(table, share)])
        if (earlier := _attempt_at(attempts, counts)) is not None:
            earlier.share = share
            continue
        plan, score = _try(model, scorer, counts, table.cost(counts), f"trial {len(attempts) + 1}", bound.store, log)
        attempts.append(_Attempt(share, plan, score))
    if resumed := sum(not attempt.plan.is_fitted for attempt in attempts):
        text = f"{resumed} of the {len(attempts)} plans that --max-drop tried were scored by the interrupted run"
        log.add_notes([Note(code=NoteCode.RESUMED, text=text)])
    all_units = {group.name: group.counts[-1] for group in groups}
    holding, scores = _holding(bound, task, dense, attempts), [attempt.score for attempt in attempts]
    expected = estimate_losses(dense, scores, higher_is_better=task.higher_is_better)
    plans = [
        replace(attempt.plan, loss=loss)
        for attempt, loss in zip(attempts, expected, strict=True)
        if attempt in holding and attempt.plan.allocation.counts != all_units
    ]
    whole = _FittedPlan(Allocation(all_units, (1.0,), (1.0,)), original)
    return [whole, *sorted(plans, key=lambda plan: plan.cost, reverse=True)], len(attempts)


def _try(
    model: PrunableModel, scorer: Scorer, counts: dict[str, int], cost: float, label: str, store: Store, log: RunLog
) -> tuple[_FittedPlan, ResampledScore]:
    """A plan and its score, which an interrupted run may have stored; its weights are then not fitted."""
    original = scorer.whole_weights
    plan = _FittedPlan(Allocation(counts, (cost,), (cost,)), original, is_fitted=False)

    def fit_and_score(_: Path) -> _Numbers:
        nonlocal plan
        model.load_weights(original)
        with log.stage(f"refitting the remaining weights, {label}") as on_progress:
            notes = model.fit(counts, on_progress)
        plan = _FittedPlan(replace(plan.allocation, notes=notes), model.weights(original))
        score = scorer.score(label)
        return score.metric, score.draws.tolist(), score.divergence

    metric, draws, divergence = store.memo(f"trial-{digest(counts)[:16]}", {"counts": counts}, fit_and_score, _SCORE)
    return plan, ResampledScore(metric, np.array(draws), divergence)


def _next_share(attempts: Sequence[_Attempt], holding: Sequence[_Attempt], least: float) -> float | None:
    """The share between the smallest that holds and the largest below it that does not; None if they are close.

    Each attempt tells more about the earlier ones, so that both bounds may move either way.

    Args:
        attempts: the attempts.
        holding: those that keep the metric.
        least: the smallest share that is tried.
    """
    high = min((attempt.plan.cost for attempt in holding), default=1.0)
    low = max((attempt.share for attempt in attempts if attempt not in holding and attempt.share < high), default=least)
    return math.sqrt(low * high) if high > _CLOSE * low else None


def _attempt_at(attempts: Sequence[_Attempt], counts: Mapping[str, int]) -> _Attempt | None:
    """The attempt of a plan, if there is one."""
    return next((attempt for attempt in attempts if attempt.plan.allocation.counts == counts), None)


def _load_weights(model: PrunableModel, plan: _FittedPlan, log: RunLog) -> Allocation:
    """Give the model the weights of a plan; the numbers of units, with the notes on these weights."""
    model.load_weights(plan.weights)
    if plan.is_fitted:
        return plan.allocation
    with log.stage("refitting the remaining weights") as on_progress:
        return replace(plan.allocation, notes=model.fit(plan.allocation.counts, on_progress))


def _holding(bound: LossBound, task: Task, dense: ResampledScore, attempts: Sequence[_Attempt]) -> list[_Attempt]:
    """The attempts that keep the metric, with margins for the choice of rows and for the precision of the engine."""
    upper = upper_losses(dense, [attempt.score for attempt in attempts], higher_is_better=task.higher_is_better)
    allowed = bound.max_drop - max(0.0, bound.quantization_drop)
    return [attempt for attempt, loss in zip(attempts, upper, strict=True) if is_within(loss, allowed)]


def _note(plans: Sequence[_FittedPlan], count: int, task: Task) -> Note:
    """What the bisection came to: how fast the last plan is by the cost table, and what it is expected to lose."""
    if len(plans) == 1:
        text = (
            f"no unit is removed: none of {count} plans is expected to keep the metric within --max-drop, with a"
            " margin; raise --max-drop, or add evaluation rows (--eval-data)"
        )
        return Note(code=NoteCode.NOTHING_REMOVED, text=text)
    plan, unit = plans[-1], task.metric_unit
    loss, error = (f"{unit.scale * value:.2g}" for value in plan.loss)
    points = " points" if unit is MetricUnit.POINTS else ""
    text = (
        f"of {count} plans, the fastest that is expected to keep the metric within --max-drop, with a margin, is"
        f" {1 / plan.cost:.3g} times as fast as the whole model by the cost table; expected loss of {task.metric}:"
        f" {loss}{points}, standard error {error}"
    )
    return Note(code=NoteCode.BUDGET_MET, text=text)


def _divided_rows(bound: LossBound) -> tuple[Dataset, Dataset | None]:
    """The evaluation rows that the bisection sees, and those of the certificate, if one is requested.

    Raises:
        UsageError: the metric cannot be certified.
        InputError: there are too few rows for a certificate.
    """
    data = bound.data
    if bound.certify is None:
        return data.eval, None
    return split_rows(data.eval, data.task, bound.max_drop, bound.certify, bound.seed)


def _certify(
    model: PrunableModel, plans: list[_FittedPlan], bound: LossBound, rows: Dataset, searched: int, log: RunLog
) -> tuple[CertifiedLoss, list[_FittedPlan]]:
    """The certificate of the loss of plans on rows kept from the search, and the plans that it covers.

    Args:
        model: the model.
        plans: the plans, the first of which is the whole model.
        bound: the loss allowed, and the confidence that is requested.
        rows: the rows.
        searched: number of rows that the bisection saw.
        log: receives stages and notes.
    """
    assert bound.certify is not None

    def losses(plan: _FittedPlan) -> np.ndarray:
        _load_weights(model, plan, log)
        predicted, labels = model.metric_sums(rows, "a plan for the certificate", log).T
        return (predicted != labels).astype(np.float64)

    certificate = certify(plans, losses, bound.max_drop, bound.certify, searched)
    earlier = record_certificate(bound.data.eval, {"run": bound.key})
    scope = CertificateScope(rows=bound.data.eval_hash or "", seed=bound.seed, earlier=earlier)
    kept = [plan.units for plan in plans]
    units = " and ".join(sorted({group.type for group in model.groups}))
    log.add_notes([certificate.note(kept, scope, units)])
    return certificate.result(kept, scope, units), plans[: certificate.certified]


def _overall(tables: Sequence[CostTable]) -> CostTable:
    """One table of shares of the whole model's time, averaged over sizes."""
    rows = tuple(
        row.with_savings(
            [
                float(np.mean([table.rows[number].savings[index] / table.whole for table in tables]))
                for index in range(len(row.counts))
            ]
        )
        for number, row in enumerate(tables[0].rows)
    )
    points = [[(total / table.whole, cost / table.whole) for total, cost in table.curve] for table in tables]
    curve = tuple(tuple(point) for point in np.mean(points, axis=0).tolist())
    return tables[0].model_copy(update={"dense": 1.0, "whole": 1.0, "rows": rows, "curve": curve})


def require_informed(dense: ResampledScore, task: Task) -> None:
    """Raise InputError if the metric of the whole model on the evaluation rows can show no loss.

    Args:
        dense: the score of the whole model.
        task: its task.
    """
    text = uninformed_text(task.metric, dense.metric, dense.constant, "evaluation")
    if text is not None and dense.order is not None:
        raise InputError(
            f"{dense.order}; --max-drop cannot bound a loss that does not show",
            code=ErrorCode.LABEL_MISMATCH,
            metric=task.metric,
            value=dense.metric,
        )
    if text is not None:
        raise InputError(
            f"{text} (--data, --eval-data); --max-drop cannot bound a loss that does not show: name other rows, or"
            " another metric (--metric)",
            code=ErrorCode.LABEL_MISMATCH,
            metric=task.metric,
            value=dense.metric,
            constant=dense.constant,
        )


def estimate_losses(
    whole: ResampledScore, scores: Sequence[ResampledScore], *, higher_is_better: bool
) -> list[LossEstimate]:
    """How much of the metric each of several plans loses.

    Every answer that changes moves the metric of a small set, so that the loss of one plan is known only to about a
    point. The divergence of the outputs is known far better, and small losses are about in proportion to it. A plan is
    therefore expected to lose its divergence times the sum of the losses over the sum of the divergences of all plans
    that diverge at most `_COMPARABLE` times as far. The standard error is that of the draws, for the divergences as
    they are.

    A plan without finite outputs loses everything, and nothing is learned from it.

    Args:
        whole: the score of the whole model.
        scores: the scores of plans.
        higher_is_better: whether a higher metric is better.
    """
    sign = 1.0 if higher_is_better else -1.0
    finite = [score for score in scores if score.is_finite]
    estimates = []
    for score in scores:
        if not score.is_finite:
            estimates.append(LossEstimate(np.inf, 0.0))
            continue
        compared = [near for near in finite if near.divergence <= _COMPARABLE * score.divergence]
        total = sum(near.divergence for near in compared)
        share = sign * (score.divergence / total if total > 0 else 1 / len(compared))
        draws = share * np.sum([whole.draws - near.draws for near in compared], axis=0)
        # A draw may leave the metric undefined (one class only); it is ignored.
        defined = draws[np.isfinite(draws)]
        error = float(np.std(defined)) if len(defined) else np.inf
        estimates.append(LossEstimate(share * sum(whole.metric - near.metric for near in compared), error))
    return estimates


def upper_losses(whole: ResampledScore, scores: Sequence[ResampledScore], *, higher_is_better: bool) -> list[float]:
    """The loss up to which each of several plans is taken to go, in the unit of the metric.

    It is the estimate from all plans with a margin, or what the plan itself certainly shows, whichever is more.

    Args:
        whole: the score of the whole model.
        scores: the scores of plans.
        higher_is_better: whether a higher metric is better.
    """
    upper = []
    for score, estimate in zip(scores, estimate_losses(whole, scores, higher_is_better=higher_is_better), strict=True):
        (alone,) = estimate_losses(whole, [score], higher_is_better=higher_is_better)
        upper.append(max(estimate.loss + MARGIN * estimate.error, alone.loss - _ERRORS_ALONE * alone.error))
    return upper
