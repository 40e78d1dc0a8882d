"""Remove the units of a run: the budgets of its step, on its model and rows, with what an interrupted run measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from compressor.config.methods import METHODS
from compressor.config.run import Recipe
from compressor.config.sections import MeasureConfig
from compressor.config.steps import Units
from compressor.errors import ErrorCode, SiteRefusedError, UsageError
from compressor.model_folder import fingerprint
from compressor.progress import RunLog
from compressor.pruning.constraints import Budgets, require_reachable
from compressor.pruning.costs import Size
from compressor.pruning.measure import CostSource, KeptTimes
from compressor.pruning.prune import PlanCosts, Pruned, plan_costs, prune, removes_any
from compressor.results import Candidate, size_label
from compressor.run.budget_rows import budget_rows, cost_shares, predicted_rows
from compressor.run.plan_source import check_bundles, load_start
from compressor.run.prunable_groups import prunable_groups
from compressor.run.run_context import LoadedModel, SelectedPlan
from compressor.selection.options import read_options
from compressor.selection.pool import heads_to_keep
from compressor.selection.pruners.base import Pruner, PruningInputs
from compressor.store import Store, digest
from compressor.targets.base import parse_shape
from compressor.tasks import Data
from compressor.tasks.calibration import calibration_batches, draw_rows, within_tokens
from compressor.training.processes import on_accelerator
from compressor.units import PrunableGroup, keep_all
from compressor.units.groups import linear_of
from compressor.units.layers import linear_weight
from graph_passes import Plan, Refusal

_UNKNOWN_SHARE = 0.5
"""Share of the units with which engines are timed where the metric decides how many are left."""


@dataclass(frozen=True)
class BudgetRun:
    """What pruning under a budget reads.

    Attributes:
        step: budgets, method and rows.
        recipe: the settings of the run.
        model: the model, with its groups.
        data: the rows.
        selected: the plan of an earlier step; None: there is none.
        costs: gives cost tables.
        refused: groups that cannot be removed from the graph.
        store: keeps the times of units and plans.
        statistics: folder of statistics and losses, which hold for other budgets too.
        log: receives stages and notes.
        measured: what plans cost, where that is known; None: it is measured.
    """

    step: Units
    recipe: Recipe
    model: LoadedModel
    data: Data
    selected: SelectedPlan | None
    costs: CostSource
    refused: Sequence[Refusal]
    store: Store
    statistics: Path
    log: RunLog
    measured: PlanCosts | None = None

    @property
    def budgets(self) -> Budgets:
        """The budgets of the step on what is timed and counted, except for a number of heads."""
        step = self.step
        return Budgets(step.speedup, step.milliseconds, step.macs, step.parameters)


def prune_units(run: BudgetRun) -> SelectedPlan:
    """Remove units until a budget is met, and give the model the remaining weights.

    Raises:
        SiteRefusedError: a group cannot be removed from the graph.
        InputError: the rows have fewer tokens than a linear has inputs.
        BudgetError: no plan meets the budget.
    """
    step, network = run.step, run.model.folder.model
    noted = len(run.log.notes)
    groups, notes = prunable_groups(step, run.model, run.refused)
    run.log.add_notes(notes)
    earlier = None if run.selected is None else run.selected.plan
    if step.start_from is not None:
        earlier = load_start(step, run.recipe, run.model)
    if earlier is not None:
        check_bundles(step, earlier, groups, str(step.start_from or "the plan before"))
        kept = {plan.name: len(plan.kept) for plan in earlier.groups if len(plan.kept) < plan.units}
        groups = [replace(group, limit=kept.get(group.name)) for group in groups]
        fold_gates(network, run.model.groups, earlier)
    pruner, budgets = pruner_of(run, groups), _budgets(run, groups, earlier)
    costs = run.measured or plan_costs(KeptTimes(run.costs, run.store), groups, budgets, is_timed=budgets.bounds_time)
    with on_accelerator(network):
        pruned = prune(pruner, groups, costs, budgets, run.log)
    run.log.add_notes(pruned.allocation.notes)
    plan = _plan(run, pruner, pruned, earlier)
    selected = SelectedPlan(
        plan=plan.model_copy(update={"model": fingerprint(network)}),
        curves=() if run.selected is None else run.selected.curves,
        trained=earlier is not None or removes_any(groups, pruned.allocation),
        notes=() if run.selected is None else run.selected.notes,
        budget=budget_rows(pruned.constraints, pruned.allocation)
        if run.measured is None
        else predicted_rows(costs.timed, pruned.allocation.counts),
        costs=cost_shares(pruned.tables, plan),
        engine=run.costs.engines.choice.label,
    )
    # A run that resumes after this has the notes of the plan alone.
    return replace(selected, notes=(*selected.notes, *run.log.notes[noted:]))


def _budgets(run: BudgetRun, groups: Sequence[PrunableGroup], earlier: Plan | None) -> Budgets:
    """The budgets of the step; groups that are not pruned now keep what an earlier plan keeps."""
    step, names = run.step, {group.name for group in groups}
    return replace(
        run.budgets,
        heads=None if step.keep is None else heads_to_keep(step.keep, sum(site.heads for site in run.model.sites)),
        groups=run.model.groups,
        fixed={plan.name: len(plan.kept) for plan in (earlier.groups if earlier else ()) if plan.name not in names},
    )


def fold_gates(network: PreTrainedModel, groups: Sequence[PrunableGroup], plan: Plan) -> None:
    """Multiply the gates of a plan into the weights of the linears that its groups end in, so that none is needed.

    Args:
        network: the model.
        groups: its groups.
        plan: the plan.

    Raises:
        SiteRefusedError: the linear of a group that the plan changes was not recognized.
    """
    gates = {group.name: group.gate for group in plan.groups}
    with torch.no_grad():
        for group in groups:
            if group.name not in gates:
                continue
            if group.linear is not None:
                gate = torch.tensor(gates[group.name]).repeat_interleave(group.width)
                weight = linear_weight(linear_of(network, group))
                weight.mul_(gate.to(weight))
            elif any(gate != 1 for gate in gates[group.name]):
                raise SiteRefusedError(
                    f"{group.name}: its output projection was not recognized, so a budget cannot prune further once"
                    " heads of it are removed or scaled; use either the budget or the former plan and heads",
                    code=ErrorCode.SITE_REFUSED,
                    site=group.name,
                )


def pruner_of(run: BudgetRun, groups: Sequence[PrunableGroup]) -> Pruner[Any]:
    """The method, with its rows.

    Raises:
        InputError: the rows have fewer tokens than a linear has inputs.
    """
    step, data = run.step, run.data
    rows = draw_rows(data, step.prune_rows + step.loss_rows, step.seed)
    held_out = min(step.loss_rows, len(rows) // 4)
    shuffled = np.random.default_rng(step.seed).permutation(len(rows))
    measured = [rows[index] for index in shuffled[:held_out]]
    remaining = np.sort(shuffled[held_out:])
    chosen = [rows[index] for index in remaining][: step.prune_rows]
    inputs = PruningInputs(
        model=run.model.folder.model,
        groups=groups,
        statistics=calibration_batches(data, within_tokens(data, chosen, step.prune_tokens)),
        held_out=calibration_batches(data, sorted(within_tokens(data, measured, step.loss_tokens))),
        outputs=data.task.loss_outputs,
        seed=step.seed,
        store=statistics_folder(run, groups),
    )
    method = METHODS[step.method].load()
    pruner: Pruner[Any] = method(inputs, read_options(step.method, step.options, method.options_class))
    return pruner


def statistics_folder(run: BudgetRun, groups: Sequence[PrunableGroup]) -> Path:
    """The folder of statistics and losses, named by all that they depend on, in that of the option or of the run."""
    step = run.step
    key = {
        "model": fingerprint(run.model.folder.model),
        **run.model.folder.surroundings,
        "rows": [run.data.train_hash, run.data.eval_hash, step.prune_rows, step.seed],
        "outputs": run.data.task.loss_outputs,
        "method": [step.method, step.options],
        "groups": [[group.name, group.bundle, group.parts, group.limit] for group in groups],
    }
    return run.statistics / digest(key)[:16]


def _plan(run: BudgetRun, pruner: Pruner[Any], pruned: Pruned, earlier: Plan | None) -> Plan:
    """The plan of all groups of the model; those that are not pruned now keep what an earlier plan keeps."""
    whole = keep_all(run.model.groups)
    if earlier is not None:
        # Scales are folded into the weights already.
        whole = whole.replace_groups(replace(plan, scale=()) for plan in earlier.groups)
    groups, counts = pruner.inputs.groups, pruned.allocation.counts
    removes = removes_any(groups, pruned.allocation)  # units may not have been ranked if it does not
    kept = [group.plan(pruner.kept(group, counts[group.name])) for group in groups if removes]
    before = None if run.selected is None else run.selected.plan.method
    methods = dict.fromkeys([*(before or "").split("+"), run.step.method])
    record = {
        "method": "+".join(filter(None, methods)),
        "options": pruner.options.model_dump(),
        "seed": run.step.seed,
        "data": run.data.train_hash,
    }
    return whole.replace_groups(kept).model_copy(update=record)


def check_reachable(run: BudgetRun) -> None:
    """Check what is known of a budget without measuring times, and without the plan of an earlier step.

    Args:
        run: the run, whose cost tables are counted in the graph of the whole model.

    Raises:
        SiteRefusedError: a group cannot be removed from the graph.
        InputError: the rows have fewer tokens than a linear has inputs.
        BudgetError: a budget of multiply-accumulates or parameters is below the cost of a plan without any unit.
    """
    groups, _ = prunable_groups(run.step, run.model, run.refused)
    pruner_of(run, groups)
    step = run.step
    if step.macs is not None or step.parameters is not None:
        counted = run.budgets.constraints(run.costs.count_tables())
        heads = [group for group in run.model.groups if group.type == "heads"]
        require_reachable([*groups, *heads], counted)


def timed_sizes(step: Units, measure: MeasureConfig, lengths: Sequence[int | None]) -> list[Size]:
    """The sizes at which budgets hold.

    Args:
        step: the budgets.
        measure: the batch sizes that are timed.
        lengths: the lengths that are timed.

    Raises:
        UsageError: a size of `budget_at` is not timed.
    """
    sizes: list[Size] = list(itertools.product(measure.batch, lengths))
    requested = [tuple(map(int, shape.split("x"))) for shape in step.budget_at]
    for shape in requested:
        if shape not in sizes:
            raise UsageError(
                f"--budget-at {'x'.join(map(str, shape))}: this size is not timed; add it to --batch and --seq",
                code=ErrorCode.CONTRADICTION,
                field="budget_at",
                value=shape,
            )
    return [size for size in sizes if not requested or size in requested]


def share_left(step: Units, candidates: Sequence[Candidate]) -> float:
    """About the share of the units that meets a budget: that of the work, or of the time of the fastest candidate.

    Args:
        step: the budgets.
        candidates: the candidates with their times.
    """
    if step.is_unbounded or step.keep is not None:  # as much as the metric allows
        return _UNKNOWN_SHARE
    shares = [share for share in (step.macs, step.parameters) if share is not None]
    holding = [candidate for candidate in candidates if candidate.holds and candidate.speed]
    if holding:
        best = max(holding, key=lambda candidate: candidate.speed or 0.0)
        if step.speedup is not None:
            shares.append((best.speed or 0.0) / step.speedup)
        if step.milliseconds is not None:
            labels = {size_label(*parse_shape(shape)) for shape in step.budget_at}
            times = {label: time for label, time in best.milliseconds.items() if label in labels} or best.milliseconds
            shares.append(step.milliseconds / max(times.values()))
    return min(1.0, *shares)
