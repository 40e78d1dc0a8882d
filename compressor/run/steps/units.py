"""Remove heads and neurons under a budget, for the engine that will be delivered."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.config.fields import flag_of
from compressor.config.steps import Step, Units
from compressor.engines.build import drops_unread
from compressor.engines.choices import Choice
from compressor.engines.choose import ChosenEngine, LaterPruning, choose_engine, fastest_of
from compressor.engines.score import EvaluationScorer
from compressor.engines.trials import Trial
from compressor.errors import CompressorError, ErrorCode, InputError, UsageError
from compressor.measure.costs import CostTable
from compressor.model_folder import example_feeds_by_size
from compressor.processes import by_main
from compressor.pruning.allocate import Allocation, Constraint, PlanCosts, budget_notes, unreachable
from compressor.pruning.costs import PlanEngines, keep_counts
from compressor.pruning.measure import CostSource
from compressor.results import Note, NoteCode
from compressor.run.generation import is_engine_of_caches
from compressor.run.model_units import prunable_groups
from compressor.run.plan_source import PlanFiles, check_start
from compressor.run.prune_units import (
    budget_rows,
    budgets_of,
    check_reachable,
    cost_shares,
    prune_units,
    share_left,
    timed_sizes,
)
from compressor.run.run_context import RunInputs
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
from compressor.selection.options import heads_to_keep
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.store import Json, Store, versioned
from compressor.targets import QUANTIZED, Engine
from compressor.tasks.calibration import calibration_batches, calibration_rows, draw_rows, within_tokens
from graph_passes import GraphPassError, Plan

if TYPE_CHECKING:  # gates need PyTorch
    from compressor.generation.workload import Workload
    from compressor.selection.train_gate import UnitPool
    from compressor.units import Bundles

_POOL, _POOL_FILES = "pool", Json[dict[str, Any]](dict[str, Any])
_FEWEST_ROWS = 4
"""Fewest training rows that units are chosen by, of which a quarter is held out."""


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
    prunable_groups(step, run.model, context.graphs.refused)
    if any(before.follows is None for before in earlier):  # which may learn for hours
        check_reachable(step, context, cost_source(step, context))


@versioned(
    4,
    *("compressor.pruning", "compressor.run.prune_units", "compressor.run.request_costs"),
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
    """The engine of a plan with the settings of a candidate, which has the engine of the whole model.

    Raises:
        InputError: the candidate mixes int8 and floats, and no product of the plan is faster in int8.
    """
    assert candidate.variant is not None
    engines = _plan_engines(context, candidate.choice, folder, candidate.source)
    engine = replace(engines, unpruned=candidate.variant.engine).build(plan)
    if candidate.choice.config.definite_precision in QUANTIZED and engine.precision not in QUANTIZED:
        raise InputError("no matmul is faster in int8 with these numbers of units", code=ErrorCode.UNSUPPORTED)
    return engine


FUNCTIONS = StepFunctions(_run, _check_options, _check, _rehearse)
