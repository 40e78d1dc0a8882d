"""One run from a model folder to a proven, measured engine: the list of its stages.

load -> sizes -> export, shrink, build (dense) -> select -> export, shrink, build (compressed) -> evaluate -> measure ->
report. Each stage is a function from frozen products (`products`) to a frozen product, in a module of its own. This
module alone knows their order, their progress lines, the notes, and what a resumed run skips.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from accelerate import PartialState

from compressor.config.run import Recipe
from compressor.config.sections import EngineConfig
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import example_feeds_by_size
from compressor.progress import Listener, NullListener
from compressor.results import Note, NoteCode, Report, Speed, VariantName
from compressor.run import run_notes
from compressor.run.engine_choice.choose_engine import choose_engine
from compressor.run.engine_choice.engine_trials import EngineTrials
from compressor.run.engine_choice.quantize import quantize_for_target
from compressor.run.evaluate import evaluate
from compressor.run.learn_stages import LearnedPlan, learn, run_worker
from compressor.run.machine_limit import LEAST_SECONDS, with_limits
from compressor.run.measure import engine_facts, throughputs_of, time_variants, timing_stage
from compressor.run.products import Choice, Chosen, ExportedGraph, Measurements, SelectedPlan, ShrunkGraph, Variant
from compressor.run.pruning.budget_rows import delivered_rows
from compressor.run.run_context import RunContext, load_context
from compressor.run.run_log import RunLog
from compressor.run.variant import drops_unread, rehearse, require_complete
from compressor.run.write_report import make_report, write_output
from compressor.targets import DEFAULT_TARGET, target
from compressor.units import keep_all
from compressor.workdir import WorkDir, open_workdir
from graph_passes import Refusal


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
    run = load_context(recipe, work, log, state)
    reference = run.export("dense", keep_all(run.model.groups or run.model.sites))
    dense = run.build(run.shrink(reference), run.built.engine.reference)
    refused = _rehearse(run, reference)
    learned = learn(run, reference, dense, refused)
    _note_plan(run, learned.selected)
    graph = _compress_graph(run, reference, learned.selected)
    rewritten = _build_rewritten(run, reference, graph, learned.selected)
    if run.model.missing is not None:
        quantize_for_target(graph, recipe, run.data, log)
    chosen = _build_compressed(run, graph, dense, learned)
    log.add_notes(run_notes.of_emptied_heads(learned.selected.plan, chosen.variant.graph.plan))
    evaluated = evaluate((dense, chosen.variant), run.data, recipe, log)
    measured = _measure_limits(run, chosen, _measure(run, dense, chosen.variant, rewritten))
    budget, missed = delivered_rows(learned.selected.budget, measured.speeds if run.model.missing is None else ())
    log.add_notes(missed)
    selected = replace(learned.selected, budget=budget)
    report = make_report(run, selected, dense, chosen, evaluated, measured, refused)
    return write_output(report, run, selected, dense)


def _rehearse(run: RunContext, reference: ExportedGraph) -> Sequence[Refusal]:
    """The groups that cannot be removed from the graph; a plan that is followed is validated when it is shrunk.

    Raises:
        SiteRefusedError: there are some, and units are not selected under a budget, which can leave them whole.
    """
    if run.recipe.plan_file:
        return ()
    rehearsed = rehearse(reference.path, run.model.groups or run.model.sites)
    if run.followed is None and not run.recipe.prunes:
        require_complete(rehearsed)
    return rehearsed.refused


def _note_plan(run: RunContext, selected: SelectedPlan) -> None:
    """Note how the plan was selected, and how long its masks are."""
    run.log.add_notes(selected.notes)
    run.log.add_notes(run_notes.of_selection(run.model.folder, selected, run.data))
    learned_row = None if run.followed is not None else run.sizes.longest_row
    run.log.add_notes(run_notes.of_masks(selected.plan, (*run.sizes.lengths, run.sizes.longest_row), learned_row))


def _compress_graph(run: RunContext, reference: ExportedGraph, selected: SelectedPlan) -> ShrunkGraph:
    """The graph without the units that the plan drops."""
    lower = _lowered_sites(run, selected)
    gated = run.export("compressed", selected.plan, template=reference)
    graph = run.shrink(gated, lower=lower, drop_unread=drops_unread(run.recipe))
    run.log.add_notes(run_notes.of_thinned_products(graph))
    run.log.add_notes(run_notes.of_shared_norms(graph))
    return graph


def _lowered_sites(run: RunContext, selected: SelectedPlan) -> Collection[str]:
    """Masked sites where block-sparse attention is faster than the mask as a bias."""
    if not selected.plan.masks:
        return frozenset()
    runtime = run.recipe.engine.target
    if runtime != DEFAULT_TARGET and run.model.missing is None:
        text = f"whether masks pay was timed with ONNX Runtime, not with {runtime}"
        run.log.add_notes([Note(code=NoteCode.MASKS_TIMED_ELSEWHERE, text=text)])
    with run.log.stage("timing masked attention"):
        return run.selector.lowered(selected.plan)


def _build_rewritten(
    run: RunContext, reference: ExportedGraph, graph: ShrunkGraph, selected: SelectedPlan
) -> Variant | None:
    """The dense engine with the rewrites of the compressed one; None where there are none, or nothing else was done."""
    engine = run.built.engine
    is_rewritten = graph.thinned or "norm_seconds" in target(engine.reference.target).options
    if not is_rewritten or not (selected.plan.drops_any or engine.chooses):
        return None
    thinned = run.shrink(reference, name="rewritten", drop_unread=drops_unread(run.recipe))
    return run.build(thinned, engine.reference)


def _build_compressed(run: RunContext, graph: ShrunkGraph, dense: Variant, learned: LearnedPlan) -> Chosen:
    """The engine of the compressed graph: the one that is configured, or the fastest that keeps the metric."""
    if not run.built.engine.chooses:
        return Chosen(run.build(graph, run.built.engine), Choice(run.built.engine))
    trials = EngineTrials(graph, dense, run.data, run.model.folder, run.built, run.sizes, run.work.scratch, run.log)
    if learned.engine is None:
        return choose_engine(trials, None)
    chosen = choose_engine(trials, [replace(learned.engine.choice, in_float=())])
    return replace(chosen, candidates=learned.engine.candidates)


def _measure(run: RunContext, dense: Variant, compressed: Variant, rewritten: Variant | None) -> Measurements:
    """Times at every batch size and length, then memory at the first, then throughput."""
    recipe, folder, lengths = run.recipe, run.model.folder, run.sizes.lengths
    speeds: dict[VariantName, list[Speed]] = {}
    inputs = example_feeds_by_size(folder, itertools.product(recipe.measure.batch, lengths))
    for (batch, seq), feeds in inputs.items():
        for variant in filter(None, (dense, rewritten)):
            # The second ratio is a by-product, and gets half of the time.
            seconds = recipe.measure.seconds / (1 if variant is dense else 2)
            timed = recipe.updated(seconds=seconds)
            with run.log.stage(timing_stage(batch, seq, variant.name)) as on_progress:
                row = time_variants(variant, compressed, feeds, timed, batch=batch, seq=seq, on_progress=on_progress)
                speeds.setdefault(variant.name, []).append(row)
    run.log.add_notes(run_notes.of_speeds(speeds["dense"]))
    with run.log.stage("measuring memory"):
        facts = engine_facts((dense, compressed), batch=recipe.measure.batch[0], seq=lengths[0] or 1)
    run.log.add_notes(run_notes.of_unmeasured_memory(facts))
    with run.log.stage("measuring throughput"):
        throughputs = throughputs_of(dense, compressed, facts, inputs, recipe.measure.seconds)
    return Measurements(tuple(speeds["dense"]), facts, tuple(speeds.get("rewritten", ())), throughputs)


def _measure_limits(run: RunContext, chosen: Chosen, measured: Measurements) -> Measurements:
    """The measurements with the machine's limit, where the time allowed suffices for it."""
    if run.recipe.measure.seconds < LEAST_SECONDS:
        return measured
    with run.log.stage("measuring the machine's limit"):
        configs: dict[VariantName, EngineConfig] = {
            "dense": run.built.engine.reference,
            "compressed": chosen.choice.config,
        }
        return replace(measured, facts=with_limits(measured.facts, configs, run.work.scratch))
