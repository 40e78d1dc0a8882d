"""Remove heads and neurons under a budget, for the engine that will be delivered."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from compressor.config.steps import Step, Units
from compressor.engines.build import drops_unread
from compressor.engines.choices import Choice
from compressor.engines.choose import ChosenEngine, LaterPruning, choose_engine, fastest_of
from compressor.engines.score import EvaluationScorer
from compressor.engines.trials import Trial
from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.model_folder import example_feeds_by_size
from compressor.pruning.allocate import PlanCosts
from compressor.pruning.costs import PlanEngines, keep_counts
from compressor.pruning.measure import CostSource, structure_of
from compressor.results import Note, NoteCode
from compressor.run.learn_units import learn_pool, make_pool, with_costs
from compressor.run.plan_source import PlanFiles, check_start
from compressor.run.prunable_groups import prunable_groups
from compressor.run.prune_units import BudgetRun, check_reachable, prune_units, share_left, timed_sizes
from compressor.run.run_context import RunInputs, SelectedPlan
from compressor.run.stages import stages_of
from compressor.run.steps.base import (
    DELIVERED,
    LABEL,
    PLAN,
    STATISTICS,
    State,
    StepContext,
    StepFunctions,
    signed,
    with_plan,
)
from compressor.selection.checks import check_certificate, check_max_drop, check_options, check_pool, check_task_options
from compressor.selection.options import heads_to_keep
from compressor.store import Json, Store, versioned
from compressor.targets import QUANTIZED, Engine
from compressor.tasks.calibration import calibration_rows
from compressor.training.processes import by_main
from graph_passes import GraphPassError, Plan

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
        raise InputError(
            f"{len(data.train)} training rows: too few to choose units by; give at least {_FEWEST_ROWS} (--data)",
            code=ErrorCode.TOO_FEW_ROWS,
            field="data",
            rows=len(data.train),
        )
    if step.max_drop is not None:
        check_max_drop(step.max_drop, data.eval_task)
        check_certificate(step, data)
    if step.start_from is not None:
        check_start(step.start_from, inputs.model)
    if inputs.followed is not None and inputs.followed.plan.masks:
        raise InputError(
            "the plan that is followed drops blocks by training, after which units would have to be refitted again;"
            " follow it without a budget",
            code=ErrorCode.PLAN_MISMATCH,
            field="plan",
        )


def _rehearse(step: Units, context: StepContext, earlier: Sequence[Step]) -> None:
    run = context.run
    timed_sizes(step, run.recipe.measure, run.sizes.lengths)
    prunable_groups(step, run.model, context.graphs.refused)
    if any(before.follows is None for before in earlier):  # which may learn for hours
        check_reachable(budget_run(step, context, Store(run.work.learning / step.name)))


@versioned(
    1,
    *("compressor.pruning", "compressor.run.learn_units", "compressor.run.prune_units"),
    *("compressor.selection.allocation", "compressor.selection.gates", "compressor.selection.train_gate"),
    *("compressor.selection.pruners", "compressor.training.fit"),
)
def _run(step: Units, state: State, context: StepContext, store: Store) -> State:
    """The units that meet the budget; the model has their weights."""
    if step.learns:
        return _learn(step, state, context, store)
    removed = remove_units(step, state, context, store)
    shutil.rmtree(context.run.work.learning / STATISTICS, ignore_errors=True)
    return removed


def remove_units(
    step: Units, state: State, context: StepContext, store: Store, *, measured: PlanCosts | None = None
) -> State:
    """The units that meet the budget, without training; the model has their weights.

    Args:
        step: the budget.
        state: the state before.
        context: the run.
        store: the store of the step.
        measured: what plans cost, where that is known; None: it is measured.

    Raises:
        BudgetError: no plan meets the budget.
    """
    scorer, engine = with_engine(step, state, context, store)
    plan = state.selected.plan
    earlier = None if plan.method is None and not plan.drops_any else state.selected

    def remove(work: Path) -> SelectedPlan:
        run = budget_run(step, context, store.within(work), engine, earlier)
        return prune_units(replace(run, measured=measured))

    selected = store.memo(PLAN, {}, remove, PlanFiles(context.run.model.folder.model))
    return with_last_engine(State(selected, engine, scorer), context, store)


def with_last_engine(state: State, context: StepContext, store: Store) -> State:
    """The state with the engine to deliver: that for which units were removed, or its runner-up if it is faster."""
    engine = state.engine
    assert engine is not None
    assert state.scorer is not None
    if engine.runner_up is not None:
        engine = _choose_last(context, state.scorer, engine, state.selected.plan, store)
    return State(replace(state.selected, engine=engine.choice.label), engine, state.scorer)


def with_engine(step: Units, state: State, context: StepContext, store: Store) -> tuple[EvaluationScorer, ChosenEngine]:
    """The engine to remove units for, with what scored it: that of an earlier step, or it is chosen now."""
    if state.engine is not None and state.scorer is not None:
        return state.scorer, state.engine
    scorer = stages_of(context.run).scorer(context.graphs.dense)
    return scorer, _choose_first(step, context, scorer, store)


def _learn(step: Units, state: State, context: StepContext, store: Store) -> State:
    """The units that a gate keeps; the main process writes the pool of those that compete."""
    run, folder = context.run, context.run.model.folder
    budgets = None if context.whole is None else budget_run(step, context, store)
    tables = by_main(run.state, lambda: [] if budgets is None else make_pool(budgets))

    def learn(work: Path) -> SelectedPlan:
        with run.log.stage(f"learning which units to keep ({step.method})") as on_progress:
            return signed(learn_pool(step, run.model, run.rows, store, work, on_progress), folder)

    selected = store.memo(PLAN, {}, learn, PlanFiles(folder.model))
    return with_plan(state, selected if budgets is None else with_costs(budgets, selected, tables))


def budget_run(
    step: Units,
    context: StepContext,
    store: Store,
    engine: ChosenEngine | None = None,
    selected: SelectedPlan | None = None,
) -> BudgetRun:
    """What pruning reads; without an engine, costs are those of the engine of the whole model."""
    run, dense = context.run, context.graphs.dense
    choice = Choice(run.built.engine.reference) if engine is None else engine.choice
    engines = _plan_engines(context, choice, run.work.scratch / "plans", None if engine is None else engine.source)
    inputs = example_feeds_by_size(run.model.folder, timed_sizes(step, run.recipe.measure, run.sizes.lengths))
    structure = structure_of(run.model.folder.model, run.model.groups)
    costs = CostSource(structure, run.model.groups, engines, dense.engine, inputs, run.log)
    statistics = step.statistics or run.work.learning / STATISTICS
    refused = context.graphs.refused
    return BudgetRun(step, run.recipe, run.model, run.rows, selected, costs, refused, store, statistics, run.log)


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
        raise InputError("no product is faster in int8 with these numbers of units", code=ErrorCode.UNSUPPORTED)
    return engine


def _choose_last(
    context: StepContext, scorer: EvaluationScorer, engine: ChosenEngine, plan: Plan, store: Store
) -> ChosenEngine:
    """The engine to deliver: that for which units were removed, or its runner-up if it is faster with this plan.

    Weights do not matter to times, so that this is known before they are trained for it.
    """
    assert engine.runner_up is not None
    run = context.run
    # The engine that is not delivered need not stay in memory during the training.
    nearest = {chosen.choice.label: replace(chosen, runner_up=None) for chosen in (engine, engine.runner_up)}

    def compare(_: Path) -> str:
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

    return nearest[store.memo(DELIVERED, {"engines": list(nearest)}, compare, LABEL)]


FUNCTIONS = StepFunctions(_run, _check_options, _check, _rehearse)
