"""Remove the units of a run until the budgets of its step are met, and state what was requested and what it costs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compressor.config.fields import flag_of
from compressor.config.methods import METHODS
from compressor.config.sections import MeasureConfig
from compressor.config.steps import Units
from compressor.errors import ErrorCode, SiteRefusedError, UsageError
from compressor.measure.costs import CostTable
from compressor.model_folder.access import ModelAccess
from compressor.pruning.allocate import (
    MAX_BUDGET_RATIO,
    Allocation,
    Budgets,
    Constraint,
    PlanCosts,
    plan_costs,
    prune,
    removes_any,
    require_reachable,
)
from compressor.pruning.measure import CostSource, KeptTimes
from compressor.report.formatting import ms
from compressor.results import BudgetRow, Candidate, CostShare, Generation, Note, NoteCode, Phase, Speed, size_label
from compressor.run.model_units import prunable_groups
from compressor.run.plan_source import check_bundles, load_start
from compressor.run.run_context import LoadedModel
from compressor.run.steps.base import STATISTICS, StepContext
from compressor.selection.options import heads_to_keep, read_options
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.selection.pruners.base import Pruner, PruningInputs
from compressor.store import Store, digest
from compressor.targets.base import parse_shape
from compressor.tasks import Data
from compressor.tasks.calibration import calibration_batches, compared_rows, draw_rows, within_tokens
from compressor.units import PrunableGroup, keep_all
from graph_passes import Plan

_UNKNOWN_SHARE = 0.5
"""Share of the units with which engines are timed where the metric decides how many are left."""
_DRIFT = 1.25
"""Ratio of the dense engine's times within a run from which on its speeds are called unreliable."""


def budgets_of(step: Units) -> Budgets:
    """The budgets of a step on what is timed and counted, except for a number of heads."""
    times = (step.milliseconds, step.token_milliseconds, step.prompt_milliseconds)
    return Budgets(step.speedup, *times, step.macs, step.parameters, step.cache)


def prune_units(
    step: Units,
    context: StepContext,
    source: CostSource,
    store: Store,
    before: SelectedPlan | None,
    measured: PlanCosts | None,
) -> SelectedPlan:
    """Remove units until a budget is met, and give the model the remaining weights; `before`: an earlier step's plan.

    Raises:
        SiteRefusedError: a group cannot be removed from the graph.
        InputError: the rows have fewer tokens than a linear has inputs.
        BudgetError: no plan meets the budget.
    """
    run, model, log = context.run, context.run.model, context.run.log
    access, noted = model.folder.access, len(log.notes)
    groups, notes = prunable_groups(step, model, context.graphs.refused)
    log.add_notes(notes)
    earlier = None if before is None else before.plan
    if step.start_from is not None:
        earlier = load_start(step, run.recipe, model)
    if earlier is not None:
        check_bundles(step, earlier, groups, str(step.start_from or "the plan before"))
        kept = {plan.name: len(plan.kept) for plan in earlier.groups if len(plan.kept) < plan.units}
        groups = [replace(group, limit=kept.get(group.name)) for group in groups]
        fold_gates(access, model.groups, earlier)
    names = {group.name for group in groups}
    budgets = replace(
        budgets_of(step),
        heads=None if step.keep is None else heads_to_keep(step.keep, sum(site.heads for site in model.sites)),
        groups=model.groups,
        # Groups that are not pruned now keep what an earlier plan keeps.
        fixed={plan.name: len(plan.kept) for plan in (earlier.groups if earlier else ()) if plan.name not in names},
    )
    pruner = pruner_of(step, model, run.rows, groups, _statistics(step, context))
    costs = measured or plan_costs(KeptTimes(source, store), groups, budgets, is_timed=budgets.bounds_time)
    with access.on_accelerator():
        pruned = prune(pruner, groups, costs, budgets, log)
    allocation = pruned.allocation
    log.add_notes(allocation.notes)
    plan = keep_all(model.groups)
    if earlier is not None:
        # Scales are folded into the weights already.
        plan = plan.replace_groups(replace(part, scale=()) for part in earlier.groups)
    if removes := removes_any(groups, allocation):  # units may not have been ranked if it does not
        plan = plan.replace_groups(group.plan(pruner.kept(group, allocation.counts[group.name])) for group in groups)
    methods = dict.fromkeys([*((before and before.plan.method) or "").split("+"), step.method])
    record = {
        "method": "+".join(filter(None, methods)),
        "options": pruner.options.model_dump(),
        "seed": step.seed,
        "data": run.rows.train_hash,
        "model": access.fingerprint(),
    }
    reached = predicted_rows(costs.timed, allocation.counts)
    return SelectedPlan(
        plan=plan.model_copy(update=record),
        curves=() if before is None else before.curves,
        trained=earlier is not None or removes,
        # A run that resumes after this has the notes of the plan alone.
        notes=(*(() if before is None else before.notes), *log.notes[noted:]),
        budget=budget_rows(pruned.constraints, allocation) if measured is None else reached,
        costs=cost_shares(pruned.tables, plan),
        engine=source.engines.label,
    )


def fold_gates(model: ModelAccess, groups: Sequence[PrunableGroup], plan: Plan) -> None:
    """Multiply the gates of a plan into the weights of the linears that its groups end in, so that none is needed.

    Raises:
        SiteRefusedError: the linear of a group that the plan changes was not recognized.
    """
    for group in model.fold_gates(plan, groups):
        raise SiteRefusedError(
            f"{group.name}: its output projection was not recognized, so a budget cannot prune further once heads of it"
            " are removed or scaled; use either the budget or the former plan and heads",
            code=ErrorCode.SITE_REFUSED,
            site=group.name,
        )


def pruner_of(
    step: Units, model: LoadedModel, data: Data, groups: Sequence[PrunableGroup], statistics: Path
) -> Pruner[Any]:
    """The method, with its rows; statistics and losses, which hold for other budgets too, are kept in a folder.

    Raises:
        InputError: the rows have fewer tokens than a linear has inputs.
    """
    rows = draw_rows(data, step.prune_rows + step.loss_rows, step.seed)
    held_out = min(compared_rows(data.task, data.train, step.loss_rows), len(rows) // 4)
    shuffled = np.random.default_rng(step.seed).permutation(len(rows))
    measured = [rows[index] for index in shuffled[:held_out]]
    chosen = [rows[index] for index in np.sort(shuffled[held_out:])][: step.prune_rows]
    inputs = PruningInputs(
        model=model.folder.model,
        groups=groups,
        statistics=calibration_batches(data, within_tokens(data, chosen, step.prune_tokens)),
        held_out=calibration_batches(data, sorted(within_tokens(data, measured, step.loss_tokens))),
        outputs=data.task.loss_outputs,
        seed=step.seed,
        store=statistics_folder(step, model, data, groups, statistics),
    )
    method = METHODS[step.method].load()
    pruner: Pruner[Any] = method(inputs, read_options(step.method, step.options, method.options_class))
    return pruner


def _statistics(step: Units, context: StepContext) -> Path:
    """The folder of statistics and losses of all plans: that of the option, or of the run."""
    return step.statistics or context.run.work.learning / STATISTICS


def statistics_folder(step: Units, model: LoadedModel, data: Data, groups: Sequence[PrunableGroup], path: Path) -> Path:
    """The folder of statistics and losses inside another, named by all that they depend on."""
    key = {
        "model": model.folder.access.fingerprint(),
        **model.folder.surroundings,
        "rows": [data.train_hash, data.eval_hash, step.prune_rows, step.seed],
        "outputs": data.task.loss_outputs,
        "method": [step.method, step.options],
        "groups": [[group.name, group.bundle, group.parts, group.limit] for group in groups],
    }
    return path / digest(key)[:16]


def check_reachable(step: Units, context: StepContext, source: CostSource) -> None:
    """Check what is known of a budget without measuring times, and without the plan of an earlier step.

    Raises:
        SiteRefusedError: a group cannot be removed from the graph.
        InputError: the rows have fewer tokens than a linear has inputs.
        BudgetError: a budget of multiply-accumulates or parameters is below the cost of a plan without any unit.
    """
    model = context.run.model
    groups, _ = prunable_groups(step, model, context.graphs.refused)
    pruner_of(step, model, context.run.rows, groups, _statistics(step, context))
    if step.macs is not None or step.parameters is not None:
        counted = budgets_of(step).constraints(source.count_tables())
        heads = [group for group in model.groups if group.type == "heads"]
        require_reachable([*groups, *heads], counted)


def timed_sizes(
    step: Units, measure: MeasureConfig, lengths: Sequence[int | None], field: str = "seq"
) -> list[tuple[int, int | None]]:
    """The sizes at which budgets hold; `field` is the setting of the lengths.

    Raises:
        UsageError: a size of `budget_at` is not timed.
    """
    sizes = list(itertools.product(measure.batch, lengths))
    requested = [tuple(map(int, shape.split("x"))) for shape in step.budget_at]
    for shape in requested:
        if shape not in sizes:
            raise UsageError(
                f"--budget-at {'x'.join(map(str, shape))}: this size is not timed; add it to --batch and"
                f" {flag_of(field)}",
                code=ErrorCode.CONTRADICTION,
                field="budget_at",
                value=shape,
            )
    return [size for size in sizes if not requested or size in requested]


def share_left(step: Units, candidates: Sequence[Candidate]) -> float:
    """About the share of the units that meets a budget: that of the work, or of the time of the fastest candidate.

    It is not known before the engines with caches are timed, whose calls a budget may bound alone.
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
    return min([1.0, *shares]) if shares else _UNKNOWN_SHARE


def budget_rows(constraints: Sequence[Constraint], allocation: Allocation) -> tuple[BudgetRow, ...]:
    """What was requested and what was reached, for the report."""
    costs = zip(constraints, allocation.predicted, allocation.measured, strict=True)
    return tuple(_row(part.table, predicted, measured, part.budget) for part, predicted, measured in costs)


def predicted_rows(tables: Sequence[CostTable], counts: Mapping[str, int]) -> tuple[BudgetRow, ...]:
    """What a plan that the metric bounds costs by its tables; `delivered_rows` gives the times that it reaches."""
    return tuple(_row(table, table.cost(counts), table.cost(counts), None) for table in tables)


def _row(table: CostTable, predicted: float, reached: float, requested: float | None) -> BudgetRow:
    costs = {"requested": requested, "predicted": predicted, "reached": reached, "dense": table.dense}
    return BudgetRow(**_size_of(table), unit=table.unit, **costs, met=_is_met(reached, requested))


def _is_met(reached: float, requested: float | None) -> bool:
    return requested is None or reached <= MAX_BUDGET_RATIO * requested


def delivered_rows(
    rows: Sequence[BudgetRow], speeds: Sequence[Speed], generation: Generation | None = None
) -> tuple[tuple[BudgetRow, ...], list[Note]]:
    """The rows of a budget with the times of the engine that is delivered, and of those that generate.

    Returns:
        The rows, without those that bound nothing and were not timed; and notes of those that the first engine met and
        the delivered one misses, and of sizes at which the dense engine takes another time than before.
    """
    timed: dict[tuple[int | None, int | None, Phase | None], Speed]
    timed = {(speed.batch, speed.seq, None): speed for speed in speeds if speed.void is None}
    calls = () if generation is None else generation.speeds
    timed |= {(call.speed.batch, call.speed.seq, call.phase): call.speed for call in calls}
    delivered, notes = [], []
    for row in rows:
        speed = timed.get((row.batch, row.seq, row.phase)) if row.unit == "ms" else None
        if speed is not None:
            before = row
            reached, low, high = (row.dense / ratio for ratio in (speed.ratio, speed.high, speed.low))
            met = _is_met(reached, row.requested)
            row = row.model_copy(update={"reached": reached, "low": low, "high": high, "met": met})
            drift = speed.dense.p50 / row.dense
            if max(drift, 1 / drift) > _DRIFT:
                text = (
                    f"{row.label}: the dense engine took {ms(row.dense)} when units were allocated, and takes"
                    f" {ms(speed.dense.p50)} now; other work disturbs this machine, and the speed is unreliable"
                )
                notes.append(Note(code=NoteCode.TIMES_DRIFTED, text=text))
            if row.requested is not None and before.met and not met:
                text = (
                    f"{row.label}: the plan took {ms(before.reached)} when it was chosen, and the delivered engine"
                    f" takes {ms(reached)} of {ms(row.requested)}; repeat the command on an idle machine"
                )
                notes.append(Note(code=NoteCode.BUDGET_MISSED, text=text))
        if row.requested is not None or speed is not None:
            delivered.append(row)
    return tuple(delivered), notes


def cost_shares(tables: Sequence[CostTable], plan: Plan) -> tuple[CostShare, ...]:
    """What attentions, feed-forwards and everything else cost, before and after a plan."""
    counts = plan.counts
    shares = []
    for table in tables:
        # What groups save together is not exactly the sum, so that the parts are scaled to the costs of whole plans.
        scale = _scale(table, {})
        scale_of_plan, size = _scale(table, counts), _size_of(table)
        for kind, unit_type in (("attention", "heads"), ("feed-forward", "neurons")):
            members = [(row, name) for row in table.rows if row.type == unit_type for name in row.groups]
            if not members:
                continue
            before = scale * sum(row.saving(0) for row, _ in members)
            after = scale_of_plan * sum(row.saving(0) - row.saving(counts[name]) for row, name in members)
            shares.append(CostShare(**size, unit=table.unit, type=kind, before=before, after=after))
        rest = table.least
        shares.append(CostShare(**size, unit=table.unit, type="rest", before=rest, after=rest))
    return tuple(shares)


def _size_of(table: CostTable) -> dict[str, Any]:
    """The fields of a row that name the size of a table."""
    return {"label": table.size_label, "batch": table.batch or None, "seq": table.seq, "phase": table.phase}


def _scale(table: CostTable, counts: Mapping[str, int]) -> float:
    """Ratio of what the units of a plan cost together to the sum of their costs."""
    removable = table.sum_of(counts) - table.least_sum
    return (table.cost(counts) - table.least) / removable if removable > 0 else 1.0
