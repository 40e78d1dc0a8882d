"""Learn by a gate which heads and neurons meet a budget of multiply-accumulates or parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from accelerate import PartialState

from compressor.config.run import Recipe
from compressor.measure.costs import CostTable
from compressor.progress import ProgressCallback, ignore_progress
from compressor.run.accelerator import on_accelerator
from compressor.run.engine_choice.calibrate import calibration_batches, draw_rows, within_tokens
from compressor.run.learning_store import LearningStore
from compressor.run.plan_source import store_learned
from compressor.run.products import LoadedModel, SelectedPlan
from compressor.run.pruning.budget import Allocation
from compressor.run.pruning.budget_rows import budget_notes, budget_rows, cost_shares
from compressor.run.pruning.budget_run import BudgetRun
from compressor.run.pruning.constraints import Constraint, constraints_of
from compressor.run.pruning.prunable_groups import prunable_groups
from compressor.run.pruning.unreachable_budgets import unreachable
from compressor.selection.train_gate import train_pool
from compressor.selection.unit_pool import UnitPool, make_bundles
from compressor.tasks import Data
from compressor.units import Bundles, PrunableGroup
from compressor.workdir import write_json

_POOL = "units.json"


def learn_units(run: BudgetRun, state: PartialState) -> SelectedPlan:
    """Train a gate over bundles of heads and neurons, and keep those that meet the budgets.

    The model is left with the weights that the plan belongs to. Costs are those of the tables of `prune`. Under
    `accelerate launch` the main process calls this, and every other one `learn_units_as_worker`.

    Raises:
        SiteRefusedError: a group cannot be removed from the graph.
        BudgetError: no plan meets the budgets.
        DivergedError: see `fit`.
    """
    groups, notes = prunable_groups(run.recipe, run.model, run.refused)
    run.log.add_notes(notes)
    tables = run.costs.count_tables()
    constraints = constraints_of(run.recipe, tables, heads=0)
    if run.store.load_finished_plan(run.model.folder.model) is None and not (run.store.path / _POOL).is_file():
        write_json(run.store.path / _POOL, _make_pool(run, groups, constraints).to_json())
    state.wait_for_everyone()
    with run.log.stage(f"learning which units to keep ({run.recipe.selection.method})") as on_progress:
        learned = _learn(run.recipe, run.model, run.data, run.store, on_progress)
    return _with_costs(run, learned, constraints, tables)


def learn_units_as_worker(
    recipe: Recipe, model: LoadedModel, data: Data, store: LearningStore, state: PartialState
) -> SelectedPlan:
    """Take part in `learn_units` in a process other than the main one.

    Args:
        recipe: method and schedule.
        model: the model, which has the weights of the plan afterwards.
        data: the rows.
        store: folder in which the main process stores the pool.
        state: the processes of the run.
    """
    state.wait_for_everyone()  # the main process writes the pool
    return _learn(recipe, model, data, store, ignore_progress)


def _learn(
    recipe: Recipe, model: LoadedModel, data: Data, store: LearningStore, on_progress: ProgressCallback
) -> SelectedPlan:
    """The plan that the gate learns on the pool in the store, or that of an interrupted run that finished learning."""
    network = model.folder.model
    if (finished := store.load_finished_plan(network)) is not None:
        return finished
    pool = UnitPool.from_json(json.loads((store.path / _POOL).read_text()), model.groups)
    learned = train_pool(network, model.groups, pool, data, recipe.selection, store.checkpoints, on_progress)
    return store_learned(learned, model.folder, store)


def _make_pool(run: BudgetRun, groups: Sequence[PrunableGroup], constraints: Sequence[Constraint]) -> UnitPool:
    """The units that compete, and what they cost."""
    recipe, data = run.recipe, run.data
    model = run.model.folder.model
    with run.log.stage("ordering neurons by importance") as on_progress, on_accelerator(model):
        rows = draw_rows(data, recipe.budget.prune_rows, recipe.selection.seed)
        batches = calibration_batches(data, within_tokens(data, rows, recipe.budget.prune_tokens))
        bundles = make_bundles(model, groups, batches, data.task.loss_outputs, on_progress)
    return pool_within(bundles, constraints)


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


def _with_costs(
    run: BudgetRun, selected: SelectedPlan, constraints: Sequence[Constraint], tables: Sequence[CostTable]
) -> SelectedPlan:
    """The plan with its budgets, and with where the cost goes."""
    counts = selected.plan.counts
    reached = tuple(constraint.table.cost(counts) for constraint in constraints)
    allocation = Allocation(counts, reached, reached)
    run.log.add_notes(budget_notes(constraints, allocation))
    shown = [table for table in tables if table.unit == "macs"]
    return replace(selected, budget=budget_rows(constraints, allocation), costs=cost_shares(shown, selected.plan))
