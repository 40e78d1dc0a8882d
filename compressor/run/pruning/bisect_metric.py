"""Remove as many units as the metric allows: bisection over the time of the engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from compressor.measure import paired_interval
from compressor.measure.costs import CostTable
from compressor.results import CertificateScope, CertifiedLoss, Note, NoteCode
from compressor.run.pruning.budget import Allocation, Constraint, choose_counts
from compressor.run.pruning.budget_run import BudgetRun
from compressor.selection.allocation import Curve
from compressor.selection.certified_rows import record_certificate
from compressor.selection.certify import certify, split_rows
from compressor.selection.pruners.base import Pruner
from compressor.selection.search.base import metric_drop
from compressor.tasks import statistics
from compressor.units import PrunableGroup

_BISECTIONS = 5
_LEAST_SHARE = 0.08
"""Smallest share of the cost of the whole model that the bisection tries."""
_MARGIN_ABOVE_LEAST = 1.02
"""Ratio of the smallest share that is tried to the cost of a plan that keeps nothing; no plan costs less."""
_MARGIN = 1.0
"""Standard errors of the metric's difference that the bisection keeps between it and the loss allowed."""
_INTERVAL_WIDTH = 3.92
"""Width of a 95% interval of a normal distribution, in standard deviations."""


def bisect_metric(
    run: BudgetRun,
    groups: Sequence[PrunableGroup],
    pruner: Pruner[Any],
    losses: Mapping[str, Curve],
    macs: CostTable,
) -> Allocation:
    """The fastest plan whose metric on the evaluation rows falls by no more than the loss allowed, by bisection.

    The model has the weights of the plan afterwards.

    Args:
        run: the model, the rows and the loss allowed.
        groups: the groups whose units may be removed.
        pruner: gives the model the weights of a plan.
        losses: name of the group -> loss at every number of units.
        macs: multiply-accumulates, by which equal groups are recognized when the cost table is measured.
    """
    tables = run.costs.time_tables(macs)
    searched, unseen = _divided_rows(run)
    plans = _bisect(run, groups, pruner, losses, _overall(tables), searched)
    certified = None
    if unseen is not None:
        certified, plans = _certify(run, groups, plans, unseen, len(searched))
    run.model.folder.model.load_state_dict(plans[-1].state)
    run.log.add_notes([_note(plans)])
    return replace(plans[-1].allocation, tables=tuple(tables), certificate=certified)


@dataclass(frozen=True)
class _FittedPlan:
    """Numbers of units, and the weights of the model that keeps them."""

    allocation: Allocation
    state: Mapping[str, Tensor]

    @property
    def units(self) -> int:
        return sum(self.allocation.counts.values())


def _bisect(
    run: BudgetRun,
    groups: Sequence[PrunableGroup],
    pruner: Pruner[Any],
    losses: Mapping[str, Curve],
    table: CostTable,
    rows: Dataset,
) -> list[_FittedPlan]:
    """The whole model, and the plans that keep the metric on some rows, each faster than the one before it.

    The table is of shares of the whole model's time.
    """
    network = run.model.folder.model
    original = copy.deepcopy(network.state_dict())
    dense = _statistics(run, "the whole model", rows)
    whole = Allocation({group.name: group.counts[-1] for group in groups}, (1.0,), (1.0,))
    plans = [_FittedPlan(whole, original)]
    low, high = max(_LEAST_SHARE, _MARGIN_ABOVE_LEAST * table.least), 1.0
    for number in range(1, _BISECTIONS + 1):
        share = math.sqrt(low * high)
        counts = choose_counts(groups, losses, [Constraint(table, share)])
        network.load_state_dict(original)
        with run.log.stage(f"refitting the remaining weights, trial {number}") as on_progress:
            pruner.finish(counts, on_progress)
        drop = _drop(run, dense, _statistics(run, f"trial {number}", rows))
        holds = drop <= float(run.recipe.selection.max_drop or 0.0)
        low, high = (low, share) if holds else (share, high)
        if holds and counts != whole.counts:
            cost = table.cost(counts)
            plans.append(_FittedPlan(Allocation(counts, (cost,), (cost,)), copy.deepcopy(network.state_dict())))
    return plans


def _note(plans: Sequence[_FittedPlan]) -> Note:
    """What the bisection came to: how fast the last of its plans is by the cost table."""
    if len(plans) == 1:
        text = f"none of {_BISECTIONS} plans keeps the metric on the evaluation rows within --max-drop, with a margin"
        return Note(code=NoteCode.NOTHING_REMOVED, text=text)
    text = (
        f"{1 / plans[-1].allocation.predicted[0]:.3g} times as fast as the whole model by the cost table is the fastest"
        f" of {_BISECTIONS} plans that keep the metric on the evaluation rows within --max-drop, with a margin"
    )
    return Note(code=NoteCode.BUDGET_MET, text=text)


def _divided_rows(run: BudgetRun) -> tuple[Dataset, Dataset | None]:
    """The evaluation rows that the bisection sees, and those of the certificate, if one is requested.

    Raises:
        UsageError: the metric cannot be certified.
        InputError: there are too few rows for a certificate.
    """
    selection, data = run.recipe.selection, run.data
    if selection.certify is None:
        return data.eval, None
    return split_rows(data.eval, data.task, selection.max_drop or 0.0, selection.certify, selection.seed)


def _certify(
    run: BudgetRun, groups: Sequence[PrunableGroup], plans: list[_FittedPlan], rows: Dataset, searched: int
) -> tuple[CertifiedLoss, list[_FittedPlan]]:
    """The certificate of the loss of plans on rows kept from the search, and the plans that it covers.

    Args:
        run: the model, the metric and the confidence that is requested.
        groups: the groups whose units may be removed.
        plans: the plans, the first of which is the whole model.
        rows: the rows.
        searched: number of rows that the bisection saw.
    """
    selection, network = run.recipe.selection, run.model.folder.model
    assert selection.certify is not None
    assert selection.max_drop is not None

    def losses(plan: _FittedPlan) -> np.ndarray:
        network.load_state_dict(plan.state)
        predicted, labels = _statistics(run, "a plan for the certificate", rows).T
        return (predicted != labels).astype(np.float64)

    certificate = certify(plans, losses, selection.max_drop, selection.certify, searched)
    scope, kept = _scope(run), [plan.units for plan in plans]
    units = " and ".join(sorted({group.type for group in groups}))
    run.log.add_notes([certificate.note(kept, scope, units)])
    return certificate.result(kept, scope, units), plans[: certificate.steps]


def _scope(run: BudgetRun) -> CertificateScope:
    """What the certificate of a bisection holds for; it is recorded for its evaluation rows."""
    recipe, data = run.recipe, run.data
    key = recipe.learning_key(model=run.model.folder.fingerprint or "", train=data.train_hash or "")
    earlier = record_certificate(data.eval, {"run": key})
    return CertificateScope(rows=data.eval_hash or "", seed=recipe.selection.seed, earlier=earlier)


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


def _statistics(run: BudgetRun, label: str, rows: Dataset) -> np.ndarray:
    """Sufficient statistics of the model, as it is, on evaluation rows."""
    network, task = run.model.folder.model.eval(), run.data.task

    def forward(batch: dict[str, Tensor]) -> np.ndarray:
        with torch.no_grad():
            return task.logits(network(**{name: tensor.to(network.device) for name, tensor in batch.items()}))

    scored = 0
    with run.log.stage(f"scoring {label} on the evaluation rows") as on_progress:

        def progress(count: int) -> None:
            nonlocal scored
            on_progress(scored := scored + count, len(rows))

        return statistics(task, rows, forward, progress=progress)


def _drop(run: BudgetRun, dense: np.ndarray, pruned: np.ndarray) -> float:
    """What the metric loses, with a margin for the rows that are drawn and for the precision of the engine."""
    task = run.data.task
    sign = 1 if task.higher_is_better else -1
    interval = paired_interval(dense, pruned, task.score, run.recipe.selection.seed, resamples=500)
    error = (interval.high - interval.low) / _INTERVAL_WIDTH
    drop = metric_drop(sign * task.score(dense), sign * task.score(pruned))
    return drop + _MARGIN * error + max(0.0, run.quantization_drop)
