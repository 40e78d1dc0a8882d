"""Remove heads and neurons under a budget, without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressor.config.methods import METHODS
from compressor.errors import ErrorCode, SiteRefusedError
from compressor.measure.costs import CostTable
from compressor.model_folder import fingerprint
from compressor.run.accelerator import on_accelerator
from compressor.run.engine_choice.calibrate import calibration_batches, draw_rows, within_tokens
from compressor.run.plan_source import load_start
from compressor.run.products import SelectedPlan
from compressor.run.pruning.bisect_metric import bisect_metric
from compressor.run.pruning.budget import Allocation, allocate_until_met, keep_all_within, require_reachable
from compressor.run.pruning.budget_rows import budget_notes, budget_rows, cost_shares
from compressor.run.pruning.budget_run import BudgetRun
from compressor.run.pruning.constraints import Constraint, constraints_of, head_table, macs_of
from compressor.run.pruning.prunable_groups import prunable_groups
from compressor.selection.allocation import Curve
from compressor.selection.options import read_options
from compressor.selection.pool import heads_to_keep
from compressor.selection.pruners.base import Pruner, PruningInputs
from compressor.store import digest
from compressor.units import PrunableGroup, keep_all
from compressor.units.groups import linear_of
from compressor.units.layers import linear_weight
from graph_passes import Plan


@dataclass(frozen=True)
class _Costs:
    """What plans cost.

    Attributes:
        counted: tables of parameters and multiply-accumulates.
        timed: tables of times at each size; empty where no budget is a time.
    """

    counted: Sequence[CostTable]
    timed: Sequence[CostTable] = ()


def prune(run: BudgetRun) -> SelectedPlan:
    """Remove units until a budget is met, or as many as the metric allows, and give the model the remaining weights.

    Raises:
        SiteRefusedError: a group cannot be removed from the graph.
        InputError: the rows have fewer tokens than a linear has inputs.
        BudgetError: no plan meets the budget.
    """
    folder = run.model.folder
    noted = len(run.log.notes)
    groups, notes = prunable_groups(run.step, run.model, run.refused)
    run.log.add_notes(notes)
    earlier = None if run.selected is None else run.selected.plan
    if run.step.start_from is not None:
        earlier = load_start(run.step, run.recipe, run.model, groups)
        groups = [replace(group, limit=len(earlier[group.name].kept)) for group in groups]
    if earlier is not None:
        _fold_gates(run, earlier)
    pruner = pruner_of(run, groups)
    fixed = _fixed_counts(groups, earlier)
    costs = _costs_of(run, groups, fixed)
    # Trials of a bisection are compared with a third copy.
    with on_accelerator(folder.model, copies=3 if run.step.is_unbounded else 2):
        allocation = _prune(run, groups, pruner, costs, fixed)
    run.log.add_notes(allocation.notes)
    plan = _plan(run, groups, pruner, allocation, earlier)
    selected = SelectedPlan(
        plan=plan.model_copy(update={"model": fingerprint(folder.model)}),
        curves=() if run.selected is None else run.selected.curves,
        trained=earlier is not None or _removes_any(groups, allocation),
        notes=() if run.selected is None else run.selected.notes,
        budget=allocation.budget,
        costs=cost_shares(allocation.tables, plan),
        certificate=allocation.certificate,
        engine=run.costs.engines.choice.label,
    )
    # A run that resumes after this has the notes of the plan alone.
    return replace(selected, notes=(*selected.notes, *run.log.notes[noted:]))


def _fixed_counts(groups: Sequence[PrunableGroup], earlier: Plan | None) -> dict[str, int]:
    """What an earlier plan keeps of the groups that are not pruned now."""
    names = {group.name for group in groups}
    return {} if earlier is None else {plan.name: len(plan.kept) for plan in earlier.groups if plan.name not in names}


def _costs_of(run: BudgetRun, groups: Sequence[PrunableGroup], fixed: Mapping[str, int]) -> _Costs:
    """What plans cost.

    Raises:
        BudgetError: the budget is below the cost of a plan that keeps nothing of the groups. This is known before the
            rows are read, which takes longer.
    """
    counted = run.costs.count_tables()
    require_reachable(groups, _constraints(run, counted, fixed))
    if not run.step.is_timed and not run.step.is_unbounded:
        return _Costs(counted)
    timed = run.costs.time_tables_once(macs_of(counted), run.store)
    run.costs.engines.release()
    require_reachable(groups, _constraints(run, timed, fixed))
    return _Costs(counted, timed)


def _prune(
    run: BudgetRun,
    groups: Sequence[PrunableGroup],
    pruner: Pruner[Any],
    costs: _Costs,
    fixed: Mapping[str, int],
) -> Allocation:
    """How many units each group keeps; the model has the weights of the plan afterwards."""

    def losses() -> dict[str, Curve]:
        with run.log.stage("gathering statistics of the rows") as on_progress:
            pruner.rank(on_progress)
        with run.log.stage("measuring what each group contributes") as on_progress:
            return pruner.losses(on_progress)

    if run.step.is_unbounded:
        return bisect_metric(run, groups, pruner, losses(), costs.timed)
    allocation = _by_budget(run, groups, losses, costs, fixed)
    run.costs.engines.release()
    if _removes_any(groups, allocation):
        with run.log.stage("refitting the remaining weights") as on_progress:
            pruner.finish(allocation.counts, on_progress)
        allocation = replace(allocation, notes=pruner.notes)
    return allocation


def _removes_any(groups: Sequence[PrunableGroup], allocation: Allocation) -> bool:
    return any(allocation.counts[group.name] < group.counts[-1] for group in groups)


def _fold_gates(run: BudgetRun, plan: Plan) -> None:
    """Multiply the gates of a plan into the weights of the linears that its groups end in, so that none is needed.

    Raises:
        SiteRefusedError: the linear of a group that the plan changes was not recognized.
    """
    network, gates = run.model.folder.model, {group.name: group.gate for group in plan.groups}
    with torch.no_grad():
        for group in run.model.groups:
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


def _by_budget(
    run: BudgetRun,
    groups: Sequence[PrunableGroup],
    losses: Callable[[], Mapping[str, Curve]],
    costs: _Costs,
    fixed: Mapping[str, int],
) -> Allocation:
    """The numbers of units that meet the budgets of the step; other groups keep the `fixed` numbers.

    Losses are measured only if units have to be removed.
    """
    tables = [*costs.counted, *costs.timed]
    constraints = _constraints(run, tables, fixed)

    def measure(counts: Mapping[str, int]) -> list[float]:
        """The cost under each constraint: counted by its table, or timed beside the dense engine."""
        times = iter(run.costs.time_plan_once({**fixed, **counts}, costs.timed, run.store) if costs.timed else ())
        return [next(times) if part.table.unit == "ms" else part.table.cost(counts) for part in constraints]

    allocation = keep_all_within(groups, constraints, measure)
    if allocation is None:
        allocation = allocate_until_met(groups, losses(), constraints, measure)
    run.log.add_notes(budget_notes(constraints, allocation))
    shown = (*costs.timed, *(table for table in costs.counted if table.unit == "macs"))
    return replace(allocation, budget=budget_rows(constraints, allocation), tables=shown)


def _constraints(run: BudgetRun, tables: Sequence[CostTable], fixed: Mapping[str, int]) -> list[Constraint]:
    """The budgets of the step on the costs of some tables, and on the number of heads."""
    keep, heads = run.step.keep, sum(site.heads for site in run.model.sites)
    counted_heads = [head_table(run.model.groups)] if keep is not None else []
    kept_heads = heads_to_keep(keep, heads) if keep is not None and counted_heads else heads
    every = [table.with_fixed(fixed) for table in (*tables, *counted_heads)]
    return constraints_of(run.step, every, kept_heads)


def _plan(
    run: BudgetRun,
    groups: Sequence[PrunableGroup],
    pruner: Pruner[Any],
    allocation: Allocation,
    earlier: Plan | None,
) -> Plan:
    """The plan of all groups of the model; those that are not pruned now keep what an earlier plan keeps."""
    whole = keep_all(run.model.groups)
    if earlier is not None:
        # Scales are folded into the weights already.
        whole = whole.replace_groups(replace(plan, scale=()) for plan in earlier.groups)
    removes = _removes_any(groups, allocation)  # units may not have been ranked if it does not
    pruned = [group.plan(pruner.kept(group, allocation.counts[group.name])) for group in groups if removes]
    before = None if run.selected is None else run.selected.plan.method
    record = {
        "method": "+".join(filter(None, (before, run.step.method))),
        "options": pruner.options.model_dump(),
        "seed": run.step.seed,
        "data": run.data.train_hash,
    }
    return whole.replace_groups(pruned).model_copy(update=record)
