"""Remove heads and neurons until budgets are met, for the engine that will be delivered, and state what they cost."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.config.fields import flag_of
from compressor.config.methods import METHODS
from compressor.config.sections import MeasureConfig
from compressor.config.steps import Follow, Step, Units
from compressor.engines.build import drops_unread
from compressor.engines.choices import Choice
from compressor.engines.choose import ChosenEngine, LaterPruning, choose_engine, fastest_of
from compressor.engines.score import EvaluationScorer
from compressor.engines.trials import Trial
from compressor.errors import CompressorError, ErrorCode, InputError, SiteRefusedError, UsageError
from compressor.measure.costs import CostTable
from compressor.model_folder import example_feeds_by_size
from compressor.model_folder.access import ModelAccess
from compressor.processes import by_main
from compressor.pruning.allocate import (
    MAX_BUDGET_RATIO,
    Allocation,
    Budgets,
    Constraint,
    PlanCosts,
    budget_notes,
    plan_costs,
    prune,
    removes_any,
    require_reachable,
    unreachable,
)
from compressor.pruning.costs import PlanEngines, keep_counts
from compressor.pruning.measure import CostSource, KeptTimes
from compressor.report.formatting import ms
from compressor.results import BudgetRow, Candidate, CostShare, Generation, Note, NoteCode, Phase, Speed, size_label
from compressor.run.generation import is_engine_of_caches
from compressor.run.model_units import prunable_groups
from compressor.run.plan_source import PlanFiles, check_bundles, check_start, load_start
from compressor.run.run_context import LoadedModel, RunInputs
from compressor.run.steps.base import (
    DELIVERED,
    LABEL,
    PLAN,
    STATISTICS,
    State,
    StepContext,
    StepFunctions,
    signed,
)
from compressor.selection.checks import check_certificate, check_max_drop, check_options, check_pool, check_task_options
from compressor.selection.options import heads_to_keep, read_options
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.selection.pruners.base import Pruner, PruningInputs
from compressor.store import Json, Store, digest, versioned
from compressor.targets import QUANTIZED, Engine
from compressor.targets.base import parse_shape
from compressor.tasks import Data
from compressor.tasks.calibration import (
    calibration_batches,
    calibration_rows,
    compared_rows,
    draw_rows,
    within_tokens,
)
from compressor.units import PrunableGroup, keep_all
from graph_passes import GraphPassError, Plan

if TYPE_CHECKING:  # gates need PyTorch
    from compressor.generation.workload import Workload
    from compressor.selection.train_gate import UnitPool
    from compressor.units import Bundles

_POOL, _POOL_FILES = "pool", Json[dict[str, Any]](dict[str, Any])
_FEWEST_ROWS = 4
"""Fewest training rows that units are chosen by, of which a quarter is held out."""
_UNKNOWN_SHARE = 0.5
"""Share of the units with which engines are timed where the metric decides how many are left."""
_DRIFT = 1.25
"""Ratio of the dense engine's times within a run from which on its speeds are called unreliable."""


def _check_options(step: Units) -> None:
    check_options(step)
    if step.learns:
        check_pool(step)


def _check(step: Units, inputs: RunInputs, earlier: Sequence[Step]) -> None:
    data = inputs.rows
    if step.keep is not None:
        heads_to_keep(step.keep, sum(site.heads for site in inputs.model.sites))
    if step.learns:
        check_task_options(step, data.task.name)
    elif len(data.train) < _FEWEST_ROWS:
        text = f"{len(data.train)} training rows: too few to choose units by; give at least {_FEWEST_ROWS} (--data)"
        raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, field="data", rows=len(data.train))
    if step.max_drop is not None:
        check_max_drop(step.max_drop, data.eval_task)
        check_certificate(step, data)
    export = inputs.recipe.export
    if not (inputs.model.folder.generates and is_engine_of_caches(inputs.recipe.engine)) or export.no_cache:
        _require_no_caches(step)
    if step.start_from is not None:
        check_start(step.start_from, inputs.model)
    if inputs.followed is not None and inputs.followed.plan.masks:
        raise InputError(
            "the plan that is followed drops blocks by training, after which units would have to be refitted again;"
            " follow it without a budget",
            code=ErrorCode.PLAN_MISMATCH,
            field="plan",
        )


def _require_no_caches(step: Units) -> None:
    """Raise UsageError if a budget is one that only graphs with key/value caches have."""
    if step.needs_caches:
        raise UsageError(
            f"{flag_of(step.needs_caches)}: bounds what a model that generates does with its key/value caches, in fp32"
            " on ONNX Runtime or OpenVINO; this run has no such engine, so set another budget, such as --macs 50%",
            code=ErrorCode.CONTRADICTION,
            field=step.needs_caches,
        )


def _rehearse(step: Units, context: StepContext, earlier: Sequence[Step]) -> None:
    run = context.run
    if _requests(step, context) is None:
        _require_no_caches(step)
        timed_sizes(step, run.recipe.measure, run.sizes.lengths)
    groups, _ = prunable_groups(step, run.model, context.graphs.refused)
    if all(isinstance(before, Follow) for before in earlier):
        return
    # Earlier steps may learn for hours. Times are not known before, nor is their plan.
    pruner_of(step, run.model, run.rows, groups, _statistics(step, context))
    if step.macs is not None or step.parameters is not None:
        counted = budgets_of(step).constraints(cost_source(step, context).count_tables())
        heads = [group for group in run.model.groups if group.type == "heads"]
        require_reachable([*groups, *heads], counted)


@versioned(
    4,
    *("compressor.pruning", "compressor.run.request_costs"),
    *("compressor.generation.workload", "compressor.generation.deliver"),
    *("compressor.selection.allocation", "compressor.selection.gates", "compressor.selection.train_gate"),
    *("compressor.selection.pruners", "compressor.training.fit"),
)
def _run(step: Units, state: State, context: StepContext, store: Store) -> State:
    """The units that meet the budget; the model has their weights."""
    if step.learns:
        return _learn(step, state, context, store)
    removed = remove_units(step, state, context, store)
    shutil.rmtree(context.run.work.learning / STATISTICS, ignore_errors=True)
    return with_last_engine(removed, context, store)


def remove_units(
    step: Units, state: State, context: StepContext, store: Store, *, measured: PlanCosts | None = None
) -> State:
    """The units that meet the budget for the engine of the state, without training; the model has their weights.

    Raises:
        BudgetError: no plan meets the budget.
    """
    scorer, engine = with_engine(step, state, context, store)
    plan = state.selected.plan
    earlier = None if plan.method is None and not plan.drops_any else state.selected

    def remove(work: Path) -> SelectedPlan:
        source = cost_source(step, context, engine)
        return prune_units(step, context, source, store.within(work), earlier, measured)

    selected = store.memo(PLAN, {}, remove, PlanFiles(context.run.model.folder.access))
    return State(replace(selected, engine=engine.choice.label), engine, scorer)


def with_last_engine(state: State, context: StepContext, store: Store, deadline: float = math.inf) -> State:
    """The state with the engine to deliver: that for which units were removed, or its runner-up if that is faster.

    Weights do not matter to times. After the deadline, by `time.perf_counter`, the two are not compared.
    """
    run, engine, scorer, plan = context.run, state.engine, state.scorer, state.selected.plan
    assert engine is not None
    assert scorer is not None
    # The engine that is not delivered need not stay in memory during later trainings.
    both = filter(None, (engine, engine.runner_up))
    nearest = {each.choice.label: replace(each, runner_up=None) for each in both}

    def compare(_: Path) -> str:
        if time.perf_counter() > deadline:
            return engine.choice.label
        scratch = run.work.scratch / "nearest"
        trials = run.engine_trials(scorer.dense.graph, scorer, scratch)
        built: dict[str, Engine] = {}
        with run.log.stage("building the two fastest engines with the plan"):
            for label, chosen in nearest.items():
                folder = scratch / str(len(built))
                with contextlib.suppress(CompressorError, GraphPassError):  # the remaining one is delivered
                    built[label] = _build_plan(context, chosen, folder, plan)
        labels = list(built) or [engine.choice.label]
        if len(built) > 1:
            stage = "timing the two fastest engines with the plan"
            labels = [labels[fastest_of(trials, list(built.values()), stage)]]
        if labels[0] != engine.choice.label:
            text = f"{labels[0]} is faster with the plan than {engine.choice.label}, for which units were removed"
            run.log.add_notes([Note(code=NoteCode.ENGINE_CHOSEN, text=text)])
        return labels[0]

    if engine.runner_up is None:
        return State(replace(state.selected, engine=engine.choice.label), engine, scorer)
    delivered = nearest[store.memo(DELIVERED, {"engines": list(nearest)}, compare, LABEL)]
    return State(replace(state.selected, engine=delivered.choice.label), delivered, scorer)


def with_engine(step: Units, state: State, context: StepContext, store: Store) -> tuple[EvaluationScorer, ChosenEngine]:
    """The engine to remove units for, with what scored it: that of an earlier step, or it is chosen now."""
    if state.engine is not None and state.scorer is not None:
        return state.scorer, state.engine
    scorer = context.run.stages.scorer(context.graphs.dense)
    return scorer, _choose_first(step, context, scorer, store)


def _learn(step: Units, state: State, context: StepContext, store: Store) -> State:
    """The units that a gate keeps, which trains the model; the main process writes the pool of those that compete."""
    from compressor.selection.train_gate import UnitPool, train_pool

    run, folder = context.run, context.run.model.folder
    tables = by_main(run.state, lambda: [] if context.whole is None else _make_pool(step, context, store))

    def learn(work: Path) -> SelectedPlan:
        stored = store.load(_POOL, _POOL_FILES)
        assert stored is not None
        pool = UnitPool.from_json(stored, run.model.groups)
        with run.log.stage(f"learning which units to keep ({step.method})") as on_progress:
            groups, checkpoints = run.model.groups, work / "checkpoints"
            learned = train_pool(folder.network, groups, pool, run.rows, step, checkpoints, on_progress)
            return signed(learned, folder)

    selected = store.memo(PLAN, {}, learn, PlanFiles(folder.access))
    if context.whole is None:
        return replace(state, selected=selected)
    constraints, counts = budgets_of(step).constraints(tables), selected.plan.counts
    reached = tuple(constraint.table.cost(counts) for constraint in constraints)
    allocation = Allocation(counts, reached, reached)
    run.log.add_notes(budget_notes(constraints, allocation))
    costs = cost_shares([table for table in tables if table.unit == "macs"], selected.plan)
    selected = replace(selected, budget=budget_rows(constraints, allocation), costs=costs)
    return replace(state, selected=selected)


def _make_pool(step: Units, context: StepContext, store: Store) -> list[CostTable]:
    """Store the units that compete within the budgets, unless an interrupted run did; the tables of what units cost."""
    from compressor.models.forwards import tensors_of
    from compressor.selection.train_gate import make_bundles

    run, data, model = context.run, context.run.rows, context.run.model.folder.access
    groups, notes = prunable_groups(step, run.model, context.graphs.refused)
    run.log.add_notes(notes)
    tables = cost_source(step, context).count_tables()
    constraints = budgets_of(step).constraints(tables)

    def order(_: Path) -> dict[str, Any]:
        with run.log.stage("ordering neurons by importance") as on_progress, model.on_accelerator():
            rows = draw_rows(data, step.prune_rows, step.seed)
            batches = list(map(tensors_of, calibration_batches(data, within_tokens(data, rows, step.prune_tokens))))
            bundles = make_bundles(model.network, groups, batches, data.task.loss_outputs, on_progress)
        return pool_within(bundles, constraints).to_json()

    # Workers wait until the main process has carried out what the step does before learning.
    replace(store, processes=None).memo(_POOL, {}, order, _POOL_FILES)
    return tables


def pool_within(bundles: Sequence[Bundles], constraints: Sequence[Constraint]) -> UnitPool:
    """Bundles with their costs by the tables of constraints.

    Units that belong to no bundle cost nothing of their own: the bundles of their group share what they cost, so that
    no plan costs more than its bundles.

    Raises:
        BudgetError: a budget is below the cost of everything outside the bundles.
    """
    from compressor.selection.train_gate import UnitPool

    costs, rests = [], []
    for constraint in constraints:
        savings = [constraint.table.saving(member.name, 0) for member in bundles]
        shares = [(saving / member.count, member.count) for saving, member in zip(savings, bundles, strict=True)]
        costs.append(tuple(share for share, count in shares for _ in range(count)))
        rests.append(constraint.table.whole - sum(savings))
    limits = tuple(constraint.budget - rest for constraint, rest in zip(constraints, rests, strict=True))
    if min(limits) < 0:
        raise unreachable(constraints, rests, {member.name for member in bundles})
    return UnitPool(tuple(bundles), tuple(costs), limits)


def cost_source(step: Units, context: StepContext, engine: ChosenEngine | None = None) -> CostSource:
    """What gives the costs of plans: of the engines with caches in fp32 where budgets bound requests.

    Without an engine, costs of whole texts are those of the engine of the whole model.
    """
    run, dense = context.run, context.graphs.dense
    cached, workload = context.graphs.cached, _requests(step, context)
    if engine is None or workload is not None:
        choice, source = Choice(run.built.engine.reference), None
    else:
        choice, source = engine.choice, engine.source
    engines = _plan_engines(context, choice, run.work.scratch / "plans", source)
    structure, groups = run.model.folder.access.structure_with(run.model.groups), run.model.groups
    if cached is not None and workload is not None:
        from compressor.run.request_costs import RequestEngines

        requests = RequestEngines(engines, cached, workload, run.recipe.engine.weight_precision)
        return requests.source(structure, groups, list(run.timed_inputs), run.log, counts_cache=step.cache is not None)
    sizes = timed_sizes(step, run.recipe.measure, run.sizes.lengths)
    inputs = example_feeds_by_size(run.model.folder, sizes)
    return CostSource(structure, groups, engines, dense.engine, inputs, run.log)


def _requests(step: Units, context: StepContext) -> Workload | None:
    """The requests that the budgets bound; None: they bound calls that read whole texts."""
    run = context.run
    workload, bounds = run.sizes.workload, step.is_timed or step.is_unbounded or step.cache is not None
    if workload is None or context.graphs.cached is None or not (bounds and is_engine_of_caches(run.recipe.engine)):
        return None
    prompts = tuple(dict.fromkeys(prompt for _, prompt in workload.sizes))
    bounded = timed_sizes(step, run.recipe.measure, prompts, "prompt_tokens")
    return replace(workload, sizes=tuple(size for size in workload.sizes if size in bounded))


def _plan_engines(context: StepContext, choice: Choice, scratch: Path, quantized: Path | None) -> PlanEngines:
    """The engines of plans; `quantized` is the quantized graph of the whole model, if there is one already."""
    run = context.run
    return PlanEngines(
        reference=context.graphs.reference,
        choice=choice,
        options=run.sizes.build,
        row=calibration_rows(run.rows, 1, run.recipe.selection.seed)[0],
        drop_unread=drops_unread(run.recipe.export, run.recipe.engine),
        scratch=scratch,
        quantized=quantized,
        matmul_times=run.matmul_times,
    )


def _choose_first(step: Units, context: StepContext, scorer: EvaluationScorer, store: Store) -> ChosenEngine:
    """The engine to prune for: the fastest, with about as many units as the budget leaves, that keeps the metric whole.

    An interrupted run may have chosen it already. Times vary, so that a resumed run builds the same engine again.
    """
    run, reference = context.run, context.graphs.reference
    if not run.built.engine.chooses:
        return ChosenEngine(scorer.dense, Choice(run.built.engine))
    whole = run.shrink(reference, name="rewritten", drop_unread=drops_unread(run.built.export, run.built.engine))
    # The engines of the pruned model have folders of the same names.
    scratch = run.work.scratch / "whole"
    scratch.mkdir(exist_ok=True)
    trials = run.engine_trials(whole, scorer, scratch)
    units = step.prune_units
    skipped = frozenset().union(*(refusal.sites for refusal in context.graphs.refused))
    groups = [group for group in run.model.groups if units in ("all", group.type) and group.name not in skipped]
    with tempfile.TemporaryDirectory(prefix="pruned-", dir=run.work.scratch) as pruned:

        def build_pruned(trial: Trial, share: float) -> Engine:
            counts = {group.name: group.counts[max(1, round(share * (len(group.counts) - 1)))] for group in groups}
            plan = keep_counts(reference.plan, groups, counts)
            return _build_plan(context, trial, Path(tempfile.mkdtemp(dir=pruned)), plan)

        pruning, chosen = LaterPruning(partial(share_left, step), build_pruned), list[ChosenEngine]()

        def choose(_: Path) -> list[str]:
            chosen.append(choose_engine(trials, pruning=pruning))
            return [engine.choice.label for engine in (chosen[0], chosen[0].runner_up) if engine is not None]

        decided = store.memo("engine", {}, choose, Json[list[str]](list[str]))
        return chosen[0] if chosen else choose_engine(trials, pruning=pruning, decided=decided)


def _build_plan(context: StepContext, candidate: Trial | ChosenEngine, folder: Path, plan: Plan) -> Engine:
    """The engine of a plan with the settings of a candidate, which has the engine of the whole model."""
    assert candidate.variant is not None
    engines = _plan_engines(context, candidate.choice, folder, candidate.source)
    engine = replace(engines, unpruned=candidate.variant.engine).build(plan)
    if candidate.choice.config.definite_precision in QUANTIZED and engine.precision not in QUANTIZED:
        raise InputError("no matmul is faster in int8 with these numbers of units", code=ErrorCode.UNSUPPORTED)
    return engine


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


FUNCTIONS = StepFunctions(_run, _check_options, _check, _rehearse)
