"""Learn by a gate which heads and neurons meet a budget of multiply-accumulates or parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.config.steps import Units
from compressor.measure.costs import CostTable
from compressor.progress import ProgressCallback
from compressor.pruning.allocate import Allocation
from compressor.pruning.constraints import Constraint, unreachable
from compressor.pruning.prune import budget_notes
from compressor.run.budget_rows import budget_rows, cost_shares
from compressor.run.prunable_groups import prunable_groups
from compressor.run.prune_units import BudgetRun
from compressor.run.run_context import LoadedModel, SelectedPlan
from compressor.selection.plan_and_curves import LearningResult
from compressor.selection.train_gate import train_pool
from compressor.selection.unit_pool import UnitPool, make_bundles
from compressor.store import Json, Store
from compressor.tasks import Data
from compressor.tasks.calibration import calibration_batches, draw_rows, within_tokens
from compressor.training.processes import on_accelerator
from compressor.units import Bundles

_POOL = "pool"
_POOL_FILES = Json[dict[str, Any]](dict[str, Any])


def make_pool(run: BudgetRun) -> list[CostTable]:
    """Store the units that compete within the budgets, unless an interrupted run did.

    Returns:
        What units cost, by the tables of `prune`.

    Raises:
        SiteRefusedError: a group cannot be removed from the graph.
        BudgetError: no plan meets the budgets.
    """
    groups, notes = prunable_groups(run.step, run.model, run.refused)
    run.log.add_notes(notes)
    tables = run.costs.count_tables()
    constraints = run.budgets.constraints(tables)
    step, data, model = run.step, run.data, run.model.folder.model

    def order(_: Path) -> dict[str, Any]:
        with run.log.stage("ordering neurons by importance") as on_progress, on_accelerator(model):
            rows = draw_rows(data, step.prune_rows, step.seed)
            batches = calibration_batches(data, within_tokens(data, rows, step.prune_tokens))
            bundles = make_bundles(model, groups, batches, data.task.loss_outputs, on_progress)
        return pool_within(bundles, constraints).to_json()

    # Workers wait until the main process has carried out what the step does before learning.
    replace(run.store, processes=None).memo(_POOL, {}, order, _POOL_FILES)
    return tables


def learn_pool(
    step: Units, model: LoadedModel, data: Data, store: Store, work: Path, on_progress: ProgressCallback
) -> LearningResult:
    """Train a gate over the pool in the store, and keep the units that meet the budgets.

    The model is left with the weights that the plan belongs to. Under `accelerate launch` every process calls this.

    Args:
        step: method and schedule.
        model: the model.
        data: the rows.
        store: has the pool.
        work: folder of unfinished work, for the checkpoints.
        on_progress: called with (step, steps).

    Raises:
        DivergedError: see `fit`.
    """
    stored = store.load(_POOL, _POOL_FILES)
    assert stored is not None
    pool = UnitPool.from_json(stored, model.groups)
    return train_pool(model.folder.model, model.groups, pool, data, step, work / "checkpoints", on_progress)


def pool_within(bundles: Sequence[Bundles], constraints: Sequence[Constraint]) -> UnitPool:
    """Bundles with their costs by the tables of constraints.

    Units that belong to no bundle cost nothing of their own: the bundles of their group share what they cost, so that
    no plan costs more than its bundles.

    Raises:
        BudgetError: a budget is below the cost of everything outside the bundles.
    """
    costs, rests = [], []
    for constraint in constraints:
        savings = [constraint.table.saving(member.name, 0) for member in bundles]
        shares = [(saving / member.count, member.count) for saving, member in zip(savings, bundles, strict=True)]
        costs.append(tuple(share for share, count in shares for _ in range(count)))
        rests.append(constraint.table.whole - sum(savings))
    limits = tuple(constraint.budget - rest for constraint, rest in zip(constraints, rests, strict=True))
    if min(limits) < 0:
        budgets, tables = zip(*((constraint.budget, constraint.table) for constraint in constraints), strict=True)
        raise unreachable(budgets, tables, rests, {member.name for member in bundles})
    return UnitPool(tuple(bundles), tuple(costs), limits)


def with_costs(run: BudgetRun, selected: SelectedPlan, tables: Sequence[CostTable]) -> SelectedPlan:
    """The plan with its budgets, and with where the cost goes, by the tables of `make_pool`."""
    counts = selected.plan.counts
    constraints = run.budgets.constraints(tables)
    reached = tuple(constraint.table.cost(counts) for constraint in constraints)
    allocation = Allocation(counts, reached, reached)
    run.log.add_notes(budget_notes(constraints, allocation))
    shown = [table for table in tables if table.unit == "macs"]
    return replace(selected, budget=budget_rows(constraints, allocation), costs=cost_shares(shown, selected.plan))
