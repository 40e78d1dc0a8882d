"""One run from a model folder to a proven, measured engine: the list of its stages.

load -> sizes -> export, shrink, build (dense) -> select -> export, shrink, build (compressed) -> evaluate -> measure ->
report. Each stage is a function from frozen products (`products`) to a frozen product, in a module of its own. This
module alone knows their order, their progress lines, the notes, and what a resumed run skips.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from accelerate import PartialState

from compressor.block_masks.attention_timer import find_attention_extras
from compressor.block_masks.mask_selector import MaskSelector
from compressor.config.run import Recipe
from compressor.config.sections import EngineConfig
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import example_inputs
from compressor.model_folder.example_inputs import token_limit
from compressor.model_folder.fingerprints import record_weights, weight_fingerprints
from compressor.progress import Listener, NullListener, ignore_progress
from compressor.results import Note, NoteCode, Report, Score, Speed, VariantName
from compressor.run import run_notes
from compressor.run.budget import delivered_rows, timed_sizes
from compressor.run.budget_run import BudgetRun
from compressor.run.calibrate import calibration_rows
from compressor.run.choose_engine import choose_engine
from compressor.run.cost_tables import CostSource
from compressor.run.distill import distill, distillation_of
from compressor.run.engine_trials import EngineTrials
from compressor.run.evaluate import score, statistics_of
from compressor.run.learn_units import learn_units, learn_units_as_worker
from compressor.run.learning_store import LearningStore, open_learning_store
from compressor.run.load import load_model, read_rows
from compressor.run.machine_limit import LEAST_SECONDS, with_limits
from compressor.run.measure import engine_facts, throughputs_of, time_variants, timing_stage
from compressor.run.plan_engines import PlanEngines
from compressor.run.plan_source import learn_plan, load_plan
from compressor.run.products import (
    Choice,
    Chosen,
    ExportedGraph,
    LoadedModel,
    Measurements,
    RunSizes,
    SelectedPlan,
    ShrunkGraph,
    Variant,
)
from compressor.run.prune import inputs_of, prune
from compressor.run.quantize import quantize_for_target
from compressor.run.run_log import RunLog
from compressor.run.sizes import work_out_sizes
from compressor.run.variant import build_variant, cpu_fallback, export_graph, rehearse, require_complete, shrink_graph
from compressor.run.write_report import make_report, write_output
from compressor.targets import DEFAULT_TARGET, target
from compressor.tasks import Data
from compressor.units import keep_all
from compressor.workdir import WorkDir, open_workdir
from graph_passes import Plan

_COPIES = 4
"""Minimum number of graphs of the model's size that are on the disk at the same time."""


def compress(recipe: Recipe, listener: Listener | None = None) -> Report:
    """Run a recipe and write its output folder, which appears complete or not at all.

    Under `accelerate launch` every process learns; the worker processes end after that.

    Args:
        recipe: what to do.
        listener: receives stages, progress and notes.

    Returns:
        The report. A metric that fell too far (`report.drop_status`) raises no error: the output is the evidence.

    Raises:
        CompressorError: see `compressor.errors`. Work that can be resumed stays in `<out>.partial`.
        GraphPassError: a plan or a graph cannot be used.
    """
    state = PartialState(cpu=not torch.cuda.is_available())
    searches = recipe.selection.searches and recipe.selects_heads
    if state.num_processes > 1 and searches and recipe.plan_file is None:
        if not state.is_main_process:
            sys.exit(UsageError.exit_code)
        raise UsageError(
            f"{recipe.selection.method} does not train; run it without accelerate launch, or distribute it with --ray",
            code=ErrorCode.CONTRADICTION,
            field="method",
        )
    if not state.is_main_process:
        run_worker(recipe, state)
        sys.exit(0)
    with open_workdir(recipe.output.out, force=recipe.output.force) as work:
        report = run_stages(recipe, work, RunLog(listener or NullListener()), state)
        work.finish()
    return report


def run_stages(recipe: Recipe, work: WorkDir, log: RunLog, state: PartialState) -> Report:
    """Run every stage in order and return the report; the output is in `work.result` afterwards."""
    with log.stage("loading the model"):
        model = load_model(recipe)
        work.reserve(_COPIES * sum(weight.nbytes for weight in model.folder.model.state_dict().values()))
    built = recipe if model.missing is None else cpu_fallback(recipe)
    if model.missing is not None:
        log.add_notes([run_notes.of_missing_target(model.missing)])
    data = None
    if recipe.rows.available:
        with log.stage("reading the rows"):
            data = read_rows(recipe, model)
    distillation = distillation_of(recipe, model, data) if recipe.distills and data is not None else None
    followed = load_plan(recipe, model)
    _note_inputs(recipe, model, data, followed, log)
    sizes = work_out_sizes(recipe, model, data, followed)
    selector = _mask_selector(recipe, model, sizes)

    reference = _export("dense", model, keep_all(model.groups or model.sites), built, sizes, work, log)
    dense = _build(_shrink(reference, sizes, work, log), built.engine.reference, sizes, log)
    # A plan that is followed is validated when it is shrunk.
    rehearsed = None if recipe.plan_file else rehearse(reference.path, model.groups or model.sites)
    if followed is None and not recipe.prunes and rehearsed is not None:
        require_complete(rehearsed)
    refused = () if rehearsed is None else rehearsed.refused
    selected, engine = followed, None
    if data is not None and (followed is None or recipe.distills):
        store = open_learning_store(recipe, model, data, work.learning, state)
        log.add_notes(store.notes)
        original = weight_fingerprints(model.folder.model)
        if followed is None:
            part = store.stage("pruned") if recipe.distills else store
            selected = _learn(recipe, model, data, part, selector, log)
            if recipe.learns_units:
                choice = Choice(built.engine.reference)
                costs = _cost_source(recipe, model, data, choice, reference, dense, sizes, work, log)
                selected = learn_units(BudgetRun(recipe, model, data, None, costs, refused, 0.0, part, log), state)
            elif recipe.prunes:
                engine = _choose_first(reference, dense, data, model, built, sizes, work, log)
                costs = _cost_source(recipe, model, data, engine.choice, reference, dense, sizes, work, log)
                lost = engine.lost(data.task)
                selected = prune(BudgetRun(recipe, model, data, selected, costs, refused, lost, part, log))
        if distillation is not None:
            assert selected is not None
            state.wait_for_everyone()
            with log.stage("training on the outputs of the whole model") as on_progress:
                selected = distill(recipe, model, data, selected, distillation, store, on_progress)
        assert selected is not None
        if selected.trained:
            selected = replace(selected, plan=record_weights(selected.plan, original, model.folder.model))
    assert selected is not None
    log.add_notes(selected.notes)
    log.add_notes(run_notes.of_selection(model.folder, selected, data))
    learned_row = None if followed is not None else sizes.longest_row
    log.add_notes(run_notes.of_masks(selected.plan, (*sizes.lengths, sizes.longest_row), learned_row))

    lower = _lowered_sites(recipe, model, selected, selector, log)
    gated = _export("compressed", model, selected.plan, built, sizes, work, log, template=reference)
    drop_unread = not recipe.export.keep_unread_positions
    graph = _shrink(gated, sizes, work, log, lower=lower, drop_unread=drop_unread)
    log.add_notes(run_notes.of_thinned_products(graph))
    log.add_notes(run_notes.of_shared_norms(graph))
    rewritten = None
    is_rewritten = graph.thinned or "norm_seconds" in target(built.engine.reference.target).options
    if is_rewritten and (selected.plan.drops_any or built.engine.chooses):
        thinned = _shrink(reference, sizes, work, log, name="rewritten", drop_unread=drop_unread)
        rewritten = _build(thinned, built.engine.reference, sizes, log)
    if model.missing is not None:
        quantize_for_target(graph, recipe, data, log)
    if built.engine.chooses:
        trials = EngineTrials(graph, dense, data, model.folder, built, sizes, work.scratch, log)
        chosen = choose_engine(trials, None if engine is None else [replace(engine.choice, in_float=())])
        if engine is not None:
            chosen = replace(chosen, candidates=engine.candidates)
    else:
        chosen = Chosen(_build(graph, built.engine, sizes, log), Choice(built.engine))
    compressed = chosen.variant
    log.add_notes(run_notes.of_emptied_heads(selected.plan, compressed.graph.plan))
    scores = _evaluate(dense, compressed, data, recipe, log)
    measured = _measure(dense, compressed, rewritten, model, recipe, sizes, log)
    if recipe.measure.seconds >= LEAST_SECONDS:
        with log.stage("measuring the machine's limit"):
            configs: dict[VariantName, EngineConfig] = {
                "dense": built.engine.reference,
                "compressed": chosen.choice.config,
            }
            measured = replace(measured, facts=with_limits(measured.facts, configs, work.scratch))
    budget, missed = delivered_rows(selected.budget, measured.speeds if model.missing is None else ())
    log.add_notes(missed)
    selected = replace(selected, budget=budget)
    report = make_report(recipe, model, selected, dense, chosen, scores, measured, refused, selector, log)
    return write_output(report, model, selected, dense, work)


def _learn(
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
        selector = MaskSelector(_timed_recipe(recipe), ())  # the main process selects the masks
        if recipe.learns_units:
            selected = learn_units_as_worker(recipe, model, data, own_store, state)
        else:
            selected = _learn(recipe, model, data, own_store, selector, RunLog(NullListener()))
    if distillation is not None:
        state.wait_for_everyone()  # the main process removes units
        if recipe.prunes:
            selected = own_store.finished(model.folder.model)
        assert selected is not None
        distill(recipe, model, data, selected, distillation, store, ignore_progress)


def _choose_first(
    reference: ExportedGraph,
    dense: Variant,
    data: Data,
    model: LoadedModel,
    recipe: Recipe,
    sizes: RunSizes,
    work: WorkDir,
    log: RunLog,
) -> Chosen:
    """The engine to prune for: where several are allowed, the fastest that keeps the metric of the whole model."""
    if not recipe.engine.chooses:
        return Chosen(dense, Choice(recipe.engine))
    drop_unread = not recipe.export.keep_unread_positions
    whole = _shrink(reference, sizes, work, log, name="rewritten", drop_unread=drop_unread)
    # The engines of the pruned model have folders of the same names.
    scratch = work.scratch / "whole"
    scratch.mkdir(exist_ok=True)
    return choose_engine(EngineTrials(whole, dense, data, model.folder, recipe, sizes, scratch, log))


def _cost_source(
    recipe: Recipe,
    model: LoadedModel,
    data: Data,
    choice: Choice,
    reference: ExportedGraph,
    dense: Variant,
    sizes: RunSizes,
    work: WorkDir,
    log: RunLog,
) -> CostSource:
    """The cost tables of plans for one engine."""
    engines = PlanEngines(
        reference=reference,
        choice=choice,
        options=sizes.build,
        row=calibration_rows(data, 1, recipe.selection.seed)[0],
        drop_unread=not recipe.export.keep_unread_positions,
        scratch=work.scratch / "plans",
    )
    inputs = inputs_of(timed_sizes(recipe, sizes.lengths), partial(example_inputs, model.folder))
    return CostSource(model.folder.model, model.groups, engines, dense.engine, inputs, log)


def _note_inputs(
    recipe: Recipe, model: LoadedModel, data: Data | None, followed: SelectedPlan | None, log: RunLog
) -> None:
    log.add_notes(model.folder.notes)
    log.add_notes(data.notes if data else ())
    log.add_notes(run_notes.of_unused_fields(recipe, token_limit(model.folder.model), learns=followed is None))


def _mask_selector(recipe: Recipe, model: LoadedModel, sizes: RunSizes) -> MaskSelector:
    """The selector of masks, which times the forms of masked attention at the sizes of the run."""
    extras = {}
    if sizes.mask_reach is not None:
        extras = find_attention_extras(model.folder.model, example_inputs(model.folder, 2, 8))
    lengths = [seq for seq in sizes.lengths if seq is not None]
    return MaskSelector(_timed_recipe(recipe), lengths, sizes.longest_row, extras)


def _timed_recipe(recipe: Recipe) -> Recipe:
    """The recipe that attention is timed with: single attentions are timed only with ONNX Runtime."""
    return recipe if recipe.engine.target == DEFAULT_TARGET else cpu_fallback(recipe)


def _learning_stage(recipe: Recipe) -> str:
    heads = [f"which heads to keep ({recipe.selection.method})"] if recipe.selects_heads else []
    blocks = ["which blocks to drop"] if recipe.blocks.drops_any else []
    return f"learning {' and '.join((*heads, *blocks))}"


def _lowered_sites(
    recipe: Recipe, model: LoadedModel, selected: SelectedPlan, selector: MaskSelector, log: RunLog
) -> Collection[str]:
    """Masked sites where block-sparse attention is faster than the mask as a bias."""
    if not selected.plan.masks:
        return frozenset()
    if recipe.engine.target != DEFAULT_TARGET and model.missing is None:
        text = f"whether masks pay was timed with ONNX Runtime, not with {recipe.engine.target}"
        log.add_notes([Note(code=NoteCode.MASKS_TIMED_ELSEWHERE, text=text)])
    with log.stage("timing masked attention"):
        return selector.lowered(selected.plan)


def _export(
    name: VariantName,
    model: LoadedModel,
    plan: Plan,
    recipe: Recipe,
    sizes: RunSizes,
    work: WorkDir,
    log: RunLog,
    *,
    template: ExportedGraph | None = None,
) -> ExportedGraph:
    """Export one variant as a reference graph into the scratch folder."""
    with log.stage(f"{name}: exporting the graph"):
        file = work.scratch / f"{name}.reference.onnx"
        return export_graph(name, model.folder, plan, recipe.export, sizes.cases, file, template=template)


def _shrink(
    reference: ExportedGraph,
    sizes: RunSizes,
    work: WorkDir,
    log: RunLog,
    *,
    name: VariantName | None = None,
    lower: Collection[str] = (),
    drop_unread: bool = False,
) -> ShrunkGraph:
    """Shrink one variant; the compressed one goes into the output folder."""
    name = name or reference.name
    folder = work.result if name == "compressed" else work.scratch / name
    folder.mkdir(exist_ok=True)
    with log.stage(f"{name}: shrinking the graph"):
        file = folder / "model.onnx"
        return shrink_graph(reference, sizes.cases, file, name=name, lower=lower, drop_unread=drop_unread)


def _build(graph: ShrunkGraph, config: EngineConfig, sizes: RunSizes, log: RunLog) -> Variant:
    with log.stage(f"{graph.name}: building the engine"):
        return build_variant(graph, config, sizes.build, sizes.cases)


def _evaluate(dense: Variant, compressed: Variant, data: Data | None, recipe: Recipe, log: RunLog) -> tuple[Score, ...]:
    """The metric of both variants on the test rows; empty without rows."""
    if data is None:
        return ()
    statistics = {}
    for variant in (dense, compressed):
        with log.stage(f"{variant.name}: scoring on the test rows") as on_progress:
            statistics[variant.name] = statistics_of(variant, data, recipe.selection.batch_size, on_progress)
    return (score(statistics["dense"], statistics["compressed"], data, recipe.selection.seed),)


def _measure(
    dense: Variant,
    compressed: Variant,
    rewritten: Variant | None,
    model: LoadedModel,
    recipe: Recipe,
    sizes: RunSizes,
    log: RunLog,
) -> Measurements:
    """Times at every batch size and length, then memory at the first, then throughput."""
    speeds: dict[VariantName, list[Speed]] = {}
    inputs = {
        (batch, seq): {name: value.numpy() for name, value in example_inputs(model.folder, batch, seq or 1).items()}
        for batch, seq in itertools.product(recipe.measure.batch, sizes.lengths)
    }
    for (batch, seq), feeds in inputs.items():
        for variant in filter(None, (dense, rewritten)):
            # The second ratio is a by-product, and gets half of the time.
            seconds = recipe.measure.seconds / (1 if variant is dense else 2)
            timed = recipe.updated(seconds=seconds)
            with log.stage(timing_stage(batch, seq, variant.name)) as on_progress:
                row = time_variants(variant, compressed, feeds, timed, batch=batch, seq=seq, on_progress=on_progress)
                speeds.setdefault(variant.name, []).append(row)
    with log.stage("measuring memory"):
        first = {"batch": recipe.measure.batch[0], "seq": sizes.lengths[0] or 1}
        facts = engine_facts((dense, compressed), **first)
    log.add_notes(run_notes.of_unmeasured_memory(facts))
    with log.stage("measuring throughput"):
        throughputs = throughputs_of(dense, compressed, facts, inputs, recipe.measure.seconds)
    return Measurements(tuple(speeds["dense"]), facts, tuple(speeds.get("rewritten", ())), throughputs)
