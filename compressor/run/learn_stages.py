"""The stages that learn: heads and blocks, units within a budget, and the training of what is left."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import PartialState

from compressor.block_masks.mask_selector import MaskSelector
from compressor.config.run import Recipe
from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.model_folder import example_feeds_by_size
from compressor.model_folder.fingerprints import record_weights, weight_fingerprints
from compressor.progress import NullListener, ignore_progress
from compressor.results import Note, NoteCode
from compressor.run.distillation.distill import distill, distillation_of
from compressor.run.engine_choice.calibrate import calibration_rows
from compressor.run.engine_choice.choose_engine import choose_engine
from compressor.run.engine_choice.engine_trials import EngineTrials, Trial
from compressor.run.engine_choice.evaluation_scorer import EvaluationScorer
from compressor.run.engine_choice.trial_times import fastest_of
from compressor.run.learning_store import LearningStore, open_learning_store
from compressor.run.load import load_model, read_rows
from compressor.run.plan_source import learn_plan, load_plan, load_weights
from compressor.run.products import Choice, ChosenEngine, ExportedGraph, LoadedModel, SelectedPlan, Variant
from compressor.run.pruning.budget_run import BudgetRun
from compressor.run.pruning.constraints import timed_sizes
from compressor.run.pruning.cost_tables import CostSource
from compressor.run.pruning.early_checks import check_before_heads
from compressor.run.pruning.learn_units import learn_units, learn_units_as_worker
from compressor.run.pruning.measure_times import keep_counts
from compressor.run.pruning.plan_engines import PlanEngines
from compressor.run.pruning.prunable_groups import prunable_groups, prunable_types
from compressor.run.pruning.prune import prune
from compressor.run.run_context import RunContext, timed_recipe
from compressor.run.run_log import RunLog
from compressor.run.variant import drops_unread
from compressor.targets import QUANTIZED, Engine
from compressor.tasks import Data
from compressor.workdir import WorkDir
from graph_passes import GraphPassError, Plan, Refusal


@dataclass(frozen=True)
class LearnedPlan:
    """The plan of a run.

    Attributes:
        selected: the plan, whose weights the model has.
        engine: the engine that units were pruned for; None: units were not pruned for an engine.
        scorer: scored the engines that it was chosen from; None: units were not pruned for an engine.
    """

    selected: SelectedPlan
    engine: ChosenEngine | None = None
    scorer: EvaluationScorer | None = None


def learn(run: RunContext, reference: ExportedGraph, dense: Variant, refused: Sequence[Refusal]) -> LearnedPlan:
    """Learn the plan, or take that to follow, and train what is left; the model has the weights of the plan afterwards.

    Args:
        run: the run.
        reference: reference graph of the whole model.
        dense: the engine of the whole model.
        refused: groups that cannot be removed from the graph.
    """
    data, followed = run.data, run.followed
    if data is None or (followed is not None and not run.recipe.distills):
        assert followed is not None
        return LearnedPlan(load_weights(run.recipe, run.model, followed))
    store = open_learning_store(run.recipe, run.model, data, run.work.learning, run.state)
    run.log.add_notes(store.notes)
    network = run.model.folder.model
    original = weight_fingerprints(network)
    if followed is None:
        learned = _learn_units(run, data, store, reference, dense, refused)
    else:
        learned = LearnedPlan(load_weights(run.recipe, run.model, followed))
    selected = learned.selected
    if run.distillation is not None:
        run.state.wait_for_everyone()
        with run.log.stage("training on the outputs of the whole model") as on_progress:
            selected = distill(run.recipe, run.model, data, selected, run.distillation, store, on_progress)
    if selected.trained:
        selected = replace(selected, plan=record_weights(selected.plan, original, network))
    return replace(learned, selected=selected)


def run_worker(recipe: Recipe, state: PartialState) -> None:
    """Take part in training as a worker process of a distributed run; the main process does everything else."""
    model = load_model(recipe)
    selected = load_plan(recipe, model)
    if recipe.rows.data is None or (selected is not None and not recipe.distills):
        return
    data = read_rows(recipe, model)
    state.wait_for_everyone()  # the main process opens the store
    distillation = distillation_of(recipe, model, data) if recipe.distills else None
    store = LearningStore(WorkDir(recipe.output.out.absolute()).learning)
    own_store = store.stage("pruned") if recipe.distills else store
    if selected is None:
        selector = MaskSelector(timed_recipe(recipe), ())  # the main process selects the masks
        if recipe.learns_units:
            selected = learn_units_as_worker(recipe, model, data, own_store, state)
        else:
            selected = _learn_heads(recipe, model, data, own_store, selector, RunLog(NullListener()))
    else:
        selected = load_weights(recipe, model, selected)
    if distillation is not None:
        state.wait_for_everyone()  # the main process removes units
        if recipe.prunes:
            selected = own_store.load_finished_plan(model.folder.model)
            if selected is not None:
                selected = replace(selected, engine=own_store.delivered or selected.engine)
        assert selected is not None
        distill(recipe, model, data, selected, distillation, store, ignore_progress)


def _learn_units(
    run: RunContext,
    data: Data,
    store: LearningStore,
    reference: ExportedGraph,
    dense: Variant,
    refused: Sequence[Refusal],
) -> LearnedPlan:
    """The plan of heads and blocks, or of the units that meet a budget, possibly after a method of heads alone."""
    recipe, model = run.recipe, run.model
    part = store.stage("pruned") if recipe.distills else store
    if recipe.prunes or recipe.learns_units:  # what cannot be pruned ends the run before heads are learned for hours
        timed_sizes(recipe, run.sizes.lengths)
        prunable_groups(recipe, model, refused)
    if recipe.prunes_after_heads:
        costs = _cost_source(run, data, Choice(run.built.engine.reference), reference, dense)
        check_before_heads(BudgetRun(recipe, model, data, None, costs, refused, 0.0, part, run.log))
    heads = _learn_heads(recipe, model, data, part, run.selector, run.log)
    if recipe.learns_units:
        costs = _cost_source(run, data, Choice(run.built.engine.reference), reference, dense)
        budget_run = BudgetRun(recipe, model, data, None, costs, refused, 0.0, part, run.log)
        return LearnedPlan(learn_units(budget_run, run.state))
    if recipe.prunes:
        scorer = EvaluationScorer(dense, data, run.built, run.log)
        engine = _choose_first(run, scorer, reference, refused, part.engines)
        if run.built.engine.chooses:
            nearest = (engine, engine.runner_up)
            part.keep_engines([chosen.choice.label for chosen in nearest if chosen is not None])
        costs = _cost_source(run, data, engine.choice, reference, dense, engine.source)
        budget_run = BudgetRun(recipe, model, data, heads, costs, refused, engine.lost(data.task), part, run.log)
        selected = prune(budget_run)
        if engine.runner_up is not None:
            engine = _choose_last(run, scorer, engine, reference, selected.plan, part)
        return LearnedPlan(replace(selected, engine=engine.choice.label), engine, scorer)
    assert heads is not None
    return LearnedPlan(heads)


def _learn_heads(
    recipe: Recipe,
    model: LoadedModel,
    data: Data,
    store: LearningStore,
    selector: MaskSelector,
    log: RunLog,
) -> SelectedPlan | None:
    """The heads and blocks that a method of their own selects; None where all units are selected within a budget."""
    if recipe.learns_units or not (recipe.selects_heads or recipe.blocks.drops_any):
        return None
    own_store = store.stage("heads") if recipe.prunes else store
    with log.stage(_learning_stage(recipe)) as on_progress:
        learned = learn_plan(recipe, model, data, own_store, selector, on_progress)
        selector.recall(store.blocks / "planned.json")
    return learned


def _learning_stage(recipe: Recipe) -> str:
    heads = [f"which heads to keep ({recipe.selection.method})"] if recipe.selects_heads else []
    blocks = ["which blocks to drop"] if recipe.blocks.drops_any else []
    return f"learning {' and '.join((*heads, *blocks))}"


def _choose_first(
    run: RunContext,
    scorer: EvaluationScorer,
    reference: ExportedGraph,
    refused: Sequence[Refusal],
    decided: Sequence[str],
) -> ChosenEngine:
    """The engine to prune for: the fastest, with about as many units as the budget leaves, that keeps the metric whole.

    An interrupted run may have `decided` already, by the labels of the engine and of its runner-up; empty: it has not.
    """
    data = scorer.data
    if not run.built.engine.chooses:
        return ChosenEngine(scorer.dense, Choice(run.built.engine))
    assert data is not None
    whole = run.shrink(reference, name="rewritten", drop_unread=drops_unread(run.built))
    # The engines of the pruned model have folders of the same names.
    scratch = run.work.scratch / "whole"
    scratch.mkdir(exist_ok=True)
    trials = EngineTrials(whole, scorer, run.model.folder, run.built, run.sizes, run.product_times, scratch, run.log)
    units = prunable_types(run.recipe)
    skipped = frozenset().union(*(refusal.sites for refusal in refused))
    groups = [group for group in run.model.groups if units in ("all", group.type) and group.name not in skipped]
    with tempfile.TemporaryDirectory(prefix="pruned-", dir=run.work.scratch) as pruned:

        def build_pruned(trial: Trial, share: float) -> Engine:
            counts = {group.name: group.counts[max(1, round(share * (len(group.counts) - 1)))] for group in groups}
            plan = keep_counts(reference.plan, groups, counts)
            folder = Path(tempfile.mkdtemp(dir=pruned))
            return _build_plan(run, data, trial, reference, folder, plan)

        return choose_engine(trials, build_pruned=build_pruned, decided=decided)


def _build_plan(
    run: RunContext,
    data: Data,
    candidate: Trial | ChosenEngine,
    reference: ExportedGraph,
    folder: Path,
    plan: Plan,
) -> Engine:
    """The engine of a plan with the settings of a candidate, which has the engine of the whole model.

    Raises:
        InputError: the candidate mixes int8 and floats, and no product of the plan is faster in int8.
    """
    assert candidate.variant is not None
    engines = _plan_engines(run, data, candidate.choice, reference, folder, candidate.source)
    engine = replace(engines, unpruned=candidate.variant.engine).build(plan)
    if candidate.choice.config.definite_precision in QUANTIZED and engine.precision not in QUANTIZED:
        raise InputError("no product is faster in int8 with these numbers of units", code=ErrorCode.UNSUPPORTED)
    return engine


def _choose_last(
    run: RunContext,
    scorer: EvaluationScorer,
    engine: ChosenEngine,
    reference: ExportedGraph,
    plan: Plan,
    store: LearningStore,
) -> ChosenEngine:
    """The engine to deliver: that for which units were removed, or its runner-up if it is faster with this plan.

    Weights do not matter to times, so that this is known before they are trained for it.
    """
    assert engine.runner_up is not None
    assert run.data is not None
    # The other engine need not stay in memory during the training.
    nearest = {chosen.choice.label: replace(chosen, runner_up=None) for chosen in (engine, engine.runner_up)}
    if store.delivered in nearest:
        return nearest[store.delivered]
    scratch = run.work.scratch / "nearest"
    trials = EngineTrials(
        scorer.dense.graph, scorer, run.model.folder, run.built, run.sizes, run.product_times, scratch, run.log
    )
    built: dict[str, Engine] = {}
    with run.log.stage("building the two fastest engines with the plan"):
        for label, chosen in nearest.items():
            folder = scratch / str(len(built))
            with contextlib.suppress(CompressorError, GraphPassError):  # the other one is delivered
                built[label] = _build_plan(run, run.data, chosen, reference, folder, plan)
    labels = list(built) or [engine.choice.label]
    if len(built) > 1:
        stage = "timing the two fastest engines with the plan"
        labels = [labels[fastest_of(trials, list(built.values()), stage)]]
    store.keep_delivered(labels[0])
    if labels[0] != engine.choice.label:
        text = f"{labels[0]} is faster with the plan than {engine.choice.label}, for which units were removed"
        run.log.add_notes([Note(code=NoteCode.ENGINE_CHOSEN, text=text)])
    return nearest[labels[0]]


def _cost_source(
    run: RunContext,
    data: Data,
    choice: Choice,
    reference: ExportedGraph,
    dense: Variant,
    quantized: Path | None = None,
) -> CostSource:
    """The cost tables of plans for one engine."""
    recipe, model = run.recipe, run.model
    engines = _plan_engines(run, data, choice, reference, run.work.scratch / "plans", quantized)
    inputs = example_feeds_by_size(model.folder, timed_sizes(recipe, run.sizes.lengths))
    return CostSource(model.folder.model, model.groups, engines, dense.engine, inputs, run.log)


def _plan_engines(
    run: RunContext, data: Data, choice: Choice, reference: ExportedGraph, scratch: Path, quantized: Path | None
) -> PlanEngines:
    """The engines of plans; `quantized` is the quantized graph of the whole model, if there is one already."""
    return PlanEngines(
        reference=reference,
        choice=choice,
        options=run.sizes.build,
        row=calibration_rows(data, 1, run.recipe.selection.seed)[0],
        drop_unread=drops_unread(run.recipe),
        scratch=scratch,
        quantized=quantized,
        products=run.product_times,
    )
