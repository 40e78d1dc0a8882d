"""Remove as many units as the metric allows: bisection over the time of the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from compressor.measure.costs import CostTable
from compressor.results import CertificateScope, CertifiedLoss, MetricUnit, Note, NoteCode, is_within
from compressor.run.pruning.budget import Allocation, choose_counts
from compressor.run.pruning.budget_rows import predicted_rows
from compressor.run.pruning.budget_run import BudgetRun
from compressor.run.pruning.constraints import Constraint
from compressor.run.pruning.metric_trials import (
    LossEstimate,
    ResampledScore,
    TrialScorer,
    estimate_losses,
    require_informed,
    scored_statistics,
    upper_losses,
)
from compressor.selection.allocation import Curve
from compressor.selection.certified_rows import record_certificate
from compressor.selection.certify import certify, split_rows
from compressor.selection.pruners.base import Pruner
from compressor.store import Json, digest
from compressor.tasks import Task
from compressor.units import PrunableGroup

_BISECTIONS = 5
_LEAST_SHARE = 0.08
"""Smallest share of the cost of the whole model that the bisection tries."""
_MARGIN_ABOVE_LEAST = 1.02
"""Ratio of the smallest share that is tried to the cost of a plan that keeps nothing; no plan costs less."""
_CLOSE = 1.01
"""Ratio of two shares between which no further plan is tried."""
_NONE_LOST = LossEstimate(0.0, 0.0)
_Numbers = tuple[float, list[float], float]
_SCORE = Json[_Numbers](_Numbers)
"""Metric, draws and divergence of a `ResampledScore` in the store."""


def bisect_metric(
    run: BudgetRun,
    groups: Sequence[PrunableGroup],
    pruner: Pruner[Any],
    losses: Mapping[str, Curve],
    tables: Sequence[CostTable],
) -> Allocation:
    """The fastest plan whose metric on the evaluation rows falls by no more than the loss allowed, by bisection.

    The model has the weights of the plan afterwards.

    Args:
        run: the model, the rows and the loss allowed.
        groups: the groups whose units may be removed.
        pruner: gives the model the weights of a plan.
        losses: name of the group -> loss at every number of units.
        tables: times at each size.

    Raises:
        InputError: the whole model is no better than the same answer for every row, so that no loss would show.
    """
    searched, unseen = _divided_rows(run)
    plans, trial_count = _bisect(run, groups, pruner, losses, _overall(tables), searched)
    run.log.add_notes([_note(plans, trial_count, run.data.task)])
    certified = None
    if unseen is not None:
        certified, plans = _certify(run, groups, pruner, plans, unseen, len(searched))
    chosen = _load_weights(run, pruner, plans[-1])
    rows = predicted_rows(tables, chosen.counts)
    return replace(chosen, budget=rows, tables=tuple(tables), certificate=certified)


@dataclass(frozen=True)
class _FittedPlan:
    """Numbers of units, the weights of the model that keeps them, and how much of the metric it is expected to lose.

    A plan that an interrupted run scored has the weights of the whole model, from which it is fitted when needed.
    """

    allocation: Allocation
    state: Mapping[str, Tensor]
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
class _Trial:
    """A plan, the largest share of the whole model's time for which it was chosen, and how the model scores with it."""

    share: float
    plan: _FittedPlan
    score: ResampledScore


def _bisect(
    run: BudgetRun,
    groups: Sequence[PrunableGroup],
    pruner: Pruner[Any],
    losses: Mapping[str, Curve],
    table: CostTable,
    rows: Dataset,
) -> tuple[list[_FittedPlan], int]:
    """The whole model and the plans that keep the metric, each faster than the one before it; and how many were tried.

    The table is of shares of the whole model's time; the metric is that of the rows.
    """
    network = run.model.folder.model
    scorer = TrialScorer(network, run.data.task, rows, run.step.seed, run.log)
    dense, original = scorer.score_whole(), scorer.whole_state
    require_informed(dense, run.data.task)
    least = max(_LEAST_SHARE, _MARGIN_ABOVE_LEAST * table.cost({group.name: 0 for group in groups}))
    trials: list[_Trial] = []
    while len(trials) < _BISECTIONS:
        share = _next_share(trials, _holding(run, dense, trials), least)
        if share is None:
            break
        counts = choose_counts(groups, losses, [Constraint(table, share)])
        if (earlier := _trial_of(trials, counts)) is not None:
            earlier.share = share
            continue
        plan, score = _try(run, pruner, scorer, counts, table.cost(counts), f"trial {len(trials) + 1}")
        trials.append(_Trial(share, plan, score))
    if resumed := sum(not trial.plan.is_fitted for trial in trials):
        text = f"{resumed} of the {len(trials)} plans that --max-drop tried were scored by the interrupted run"
        run.log.add_notes([Note(code=NoteCode.RESUMED, text=text)])
    all_units = {group.name: group.counts[-1] for group in groups}
    holding, scores = _holding(run, dense, trials), [trial.score for trial in trials]
    expected = estimate_losses(dense, scores, higher_is_better=run.data.task.higher_is_better)
    plans = [
        replace(trial.plan, loss=loss)
        for trial, loss in zip(trials, expected, strict=True)
        if trial in holding and trial.plan.allocation.counts != all_units
    ]
    whole = _FittedPlan(Allocation(all_units, (1.0,), (1.0,)), original)
    return [whole, *sorted(plans, key=lambda plan: plan.cost, reverse=True)], len(trials)


def _try(
    run: BudgetRun, pruner: Pruner[Any], scorer: TrialScorer, counts: dict[str, int], cost: float, label: str
) -> tuple[_FittedPlan, ResampledScore]:
    """A plan and its score, which an interrupted run may have stored; its weights are then not fitted."""
    network, original = run.model.folder.model, scorer.whole_state
    plan = _FittedPlan(Allocation(counts, (cost,), (cost,)), original, is_fitted=False)

    def fit_and_score(_: Path) -> _Numbers:
        nonlocal plan
        network.load_state_dict(original)
        with run.log.stage(f"refitting the remaining weights, {label}") as on_progress:
            pruner.finish(counts, on_progress)
        allocation = replace(plan.allocation, notes=pruner.notes)
        plan = _FittedPlan(allocation, _copied(network.state_dict(), original))
        score = scorer.score(label)
        return score.metric, score.draws.tolist(), score.divergence

    inputs = {"statistics": pruner.inputs.store.name, "counts": counts}
    metric, draws, divergence = run.store.memo(f"trial-{digest(counts)[:16]}", inputs, fit_and_score, _SCORE)
    return plan, ResampledScore(metric, np.array(draws), divergence)


def _next_share(trials: Sequence[_Trial], holding: Sequence[_Trial], least: float) -> float | None:
    """The share between the smallest that holds and the largest below it that does not; None if they are close.

    Each trial tells more about the earlier ones, so that both bounds may move either way.

    Args:
        trials: the trials.
        holding: those that keep the metric.
        least: the smallest share that is tried.
    """
    high = min((trial.plan.cost for trial in holding), default=1.0)
    low = max((trial.share for trial in trials if trial not in holding and trial.share < high), default=least)
    return math.sqrt(low * high) if high > _CLOSE * low else None


def _trial_of(trials: Sequence[_Trial], counts: Mapping[str, int]) -> _Trial | None:
    """The trial of a plan, if there is one."""
    return next((trial for trial in trials if trial.plan.allocation.counts == counts), None)


def _copied(state: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the state of a model in main memory; tensors that have not changed are those of the whole model."""
    return {
        name: original[name]
        if not isinstance(value, Tensor) or torch.equal(value, original[name])
        else value.to("cpu", copy=True)
        for name, value in state.items()
    }


def _load_weights(run: BudgetRun, pruner: Pruner[Any], plan: _FittedPlan) -> Allocation:
    """Give the model the weights of a plan; the numbers of units, with the notes on these weights."""
    run.model.folder.model.load_state_dict(plan.state)
    if plan.is_fitted:
        return plan.allocation
    with run.log.stage("refitting the remaining weights") as on_progress:
        pruner.finish(plan.allocation.counts, on_progress)
    return replace(plan.allocation, notes=pruner.notes)


def _holding(run: BudgetRun, dense: ResampledScore, trials: Sequence[_Trial]) -> list[_Trial]:
    """The trials that keep the metric, with margins for the choice of the rows and for the precision of the engine."""
    scores, higher_is_better = [trial.score for trial in trials], run.data.task.higher_is_better
    allowed = float(run.step.max_drop or 0.0) - max(0.0, run.quantization_drop)
    upper = upper_losses(dense, scores, higher_is_better=higher_is_better)
    return [trial for trial, loss in zip(trials, upper, strict=True) if is_within(loss, allowed)]


def _note(plans: Sequence[_FittedPlan], trial_count: int, task: Task) -> Note:
    """What the bisection came to: how fast the last plan is by the cost table, and what it is expected to lose."""
    if len(plans) == 1:
        text = (
            f"no unit is removed: none of {trial_count} plans is expected to keep the metric within --max-drop, with a"
            " margin; raise --max-drop, or add evaluation rows (--eval-data)"
        )
        return Note(code=NoteCode.NOTHING_REMOVED, text=text)
    plan, unit = plans[-1], task.metric_unit
    loss, error = (f"{unit.scale * value:.2g}" for value in plan.loss)
    points = " points" if unit is MetricUnit.POINTS else ""
    text = (
        f"of {trial_count} plans, the fastest that is expected to keep the metric within --max-drop, with a margin, is"
        f" {1 / plan.cost:.3g} times as fast as the whole model by the cost table; expected loss of {task.metric}:"
        f" {loss}{points}, standard error {error}"
    )
    return Note(code=NoteCode.BUDGET_MET, text=text)


def _divided_rows(run: BudgetRun) -> tuple[Dataset, Dataset | None]:
    """The evaluation rows that the bisection sees, and those of the certificate, if one is requested.

    Raises:
        UsageError: the metric cannot be certified.
        InputError: there are too few rows for a certificate.
    """
    step, data = run.step, run.data
    if step.certify is None:
        return data.eval, None
    return split_rows(data.eval, data.task, step.max_drop or 0.0, step.certify, step.seed)


def _certify(
    run: BudgetRun,
    groups: Sequence[PrunableGroup],
    pruner: Pruner[Any],
    plans: list[_FittedPlan],
    rows: Dataset,
    searched: int,
) -> tuple[CertifiedLoss, list[_FittedPlan]]:
    """The certificate of the loss of plans on rows kept from the search, and the plans that it covers.

    Args:
        run: the model, the metric and the confidence that is requested.
        groups: the groups whose units may be removed.
        pruner: gives the model the weights of a plan.
        plans: the plans, the first of which is the whole model.
        rows: the rows.
        searched: number of rows that the bisection saw.
    """
    step, network = run.step, run.model.folder.model
    assert step.certify is not None
    assert step.max_drop is not None

    def losses(plan: _FittedPlan) -> np.ndarray:
        _load_weights(run, pruner, plan)
        values = scored_statistics(network, run.data.task, rows, "a plan for the certificate", run.log)
        predicted, labels = values.T
        return (predicted != labels).astype(np.float64)

    certificate = certify(plans, losses, step.max_drop, step.certify, searched)
    scope, kept = _scope(run), [plan.units for plan in plans]
    units = " and ".join(sorted({group.type for group in groups}))
    run.log.add_notes([certificate.note(kept, scope, units)])
    return certificate.result(kept, scope, units), plans[: certificate.steps]


def _scope(run: BudgetRun) -> CertificateScope:
    """What the certificate of a bisection holds for; it is recorded for its evaluation rows."""
    earlier = record_certificate(run.data.eval, {"run": run.store.inputs["step"]})
    return CertificateScope(rows=run.data.eval_hash or "", seed=run.step.seed, earlier=earlier)


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
