"""One run from a model folder to proven, measured engines: the list of its stages.

load -> sizes -> export, shrink, build (dense) -> steps -> export, shrink, build (compressed) -> evaluate -> measure ->
report. The steps and the stages after them are repeated for each rung of a ladder. Each stage is a function from frozen
results to a frozen result, in a module of its own. This module alone knows their order; `walk` carries out the steps.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from compressor.config.fields import fields_with, flag_of
from compressor.config.recipe_fields import FIELDS
from compressor.config.run import Recipe
from compressor.config.sections import ROW_SOURCES, EngineConfig
from compressor.config.step_list import steps_of
from compressor.config.steps import Units, parts_of
from compressor.engines.build import ExportedGraph, ShrunkGraph, Variant, drops_unread, require_complete
from compressor.engines.choices import Choice, choices
from compressor.engines.choose import ChosenEngine, choose_engine
from compressor.engines.export import rehearse
from compressor.engines.prove import prove_graphs
from compressor.engines.quantize import quantize_as
from compressor.engines.score import EvaluationScorer
from compressor.errors import CompressorError, ErrorCode, UsageError
from compressor.progress import Listener, NullListener, RunLog
from compressor.quantization import output_distance
from compressor.report import frontier_page
from compressor.report.frontier import Frontier, Rung, rung_of
from compressor.results import Note, NoteCode, Report, VariantName
from compressor.run import run_notes
from compressor.run.budget_rows import delivered_rows
from compressor.run.generation import deliver_cached, export_cached
from compressor.run.load_context import load_context, next_rung
from compressor.run.plan_source import compared_plan
from compressor.run.run_context import RunContext, SelectedPlan
from compressor.run.stages import stages_of
from compressor.run.steps.base import Graphs, Rungs, State
from compressor.run.walk import run_worker, walk
from compressor.run.write_report import make_report, write_output
from compressor.targets import DEFAULT_TARGET, target
from compressor.tasks import Data
from compressor.tasks.calibration import calibration_rows
from compressor.training.processes import process_state
from compressor.units import keep_all
from compressor.workdir import LADDER, open_workdir
from graph_passes import GraphPassError, Refusal

_COMPARED_ROWS = 32
"""Calibration rows on which a quantized graph is compared with its float graph."""


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
    if not isinstance(recipe, Recipe):
        raise UsageError(
            f"{recipe!r}: no recipe; use compress(Recipe(model=...))", code=ErrorCode.INVALID_VALUE, value=recipe
        )
    (report,) = run_rungs([recipe], listener or NullListener())
    return report


def run_rungs(rungs: Sequence[Recipe], listener: Listener, shared: Path | None = None) -> Iterator[Report]:
    """Walk the steps of rungs, each of which is delivered to its output folder before the next one begins.

    The rungs share the model, the rows, and the graph and the engine of the whole model. A rung begins with the weights
    of the model folder; its step `units` goes on from the folder of an earlier rung where it names one. Every process
    of a distributed run calls this; the worker processes end after the last step.

    Args:
        rungs: their recipes, which differ in their steps and output folders alone; one for a run without a ladder.
        listener: receives stages, progress and notes.
        shared: a folder for the graph of the whole model, which is removed; None: it is that of the only rung.

    Yields:
        The report of each rung, when its folder is complete.

    Raises:
        CompressorError: see `compress`; the folders of the rungs before are complete.
        GraphPassError: see `compress`.
    """
    if not rungs:
        return
    state, (first, *later) = process_state(), rungs
    if not state.is_main_process:
        run_worker(rungs, state)
        sys.exit(0)
    with ExitStack() as stack:
        for number, recipe in enumerate(rungs):
            _refuse_inputs_inside_output(recipe)
            with open_workdir(recipe.output.out, force=recipe.output.force) as work:
                if number == 0:
                    log, kept = RunLog(listener), work
                    if shared is not None:
                        kept = stack.enter_context(work.with_scratch(shared))
                    whole = load_context(first, kept, log, state, later)
                    graphs = _export_whole(whole)
                    run, before = replace(whole, work=work), log.later()
                else:
                    run = next_rung(whole, recipe, work, before.later())
                report = run_stages(run, graphs)
                work.finish()
            yield report


def _refuse_inputs_inside_output(recipe: Recipe) -> None:
    """Raise UsageError if the folder that `--force` replaces holds a file that the run reads or keeps."""
    out = recipe.output.out.resolve()
    if not (recipe.output.force and out.exists()):
        return
    named = [(name, recipe.value(name)) for name in (*fields_with(FIELDS, "is_path"), *ROW_SOURCES) if name != "out"]
    named += [(name, value) for step in parts_of(steps_of(recipe)) for name, value in step if isinstance(value, Path)]
    for name, value in named:
        if value is not None and Path(value).exists() and Path(value).resolve().is_relative_to(out):
            raise UsageError(
                f"{flag_of(name)} {value}: inside {recipe.output.out}, which --force replaces; write to another folder"
                " (-o)",
                code=ErrorCode.CONTRADICTION,
                fields=(name, "out"),
                value=value,
            )


def _export_whole(run: RunContext) -> Graphs:
    """Export the whole model, and build the engine that results are compared with."""
    reference = run.export("dense", keep_all(run.model.groups or run.model.sites))
    compared = compared_plan(run.recipe, run.model, run.followed)
    start = reference if compared is None else run.export("dense", compared, template=reference)
    dense = stages_of(run).build(run.shrink(start), run.built.engine.reference)
    return Graphs(reference, dense, _rehearse(run, reference), export_cached(run))


def run_stages(run: RunContext, graphs: Graphs) -> Report:
    """Walk the steps of a run or of a rung and deliver what they come to; the output is in `run.work.result` then.

    Args:
        run: the run.
        graphs: the graph and the engine of the whole model.
    """
    learned = walk(run, graphs)
    began = time.perf_counter()
    report = _deliver(run, learned, graphs)
    if learned.rungs is not None:
        _deliver_rungs(run, learned.rungs, graphs, report, time.perf_counter() - began)
    return report


def _deliver(run: RunContext, learned: State, graphs: Graphs) -> Report:
    """Export, build, prove, score and measure a plan, whose weights the model has, and write its folder."""
    recipe, work, log, dense = run.recipe, run.work, run.log, graphs.dense
    _note_plan(run, learned.selected)
    graph = _compress_graph(run, graphs.reference, learned.selected)
    rewritten = _build_rewritten(run, graphs.reference, graph, learned.selected)
    if run.model.missing is not None:
        _quantize_for_target(graph, recipe.engine, run.data, recipe.selection.seed, log)
    scorer = learned.scorer or stages_of(run).scorer(dense)
    chosen = _build_compressed(run, graph, scorer, learned)
    saved = {"dense.onnx": dense.graph.path} if run.saves_dense else {}
    fixed = prove_graphs(work.result, run.sizes.cases, log, saved)
    chosen = replace(chosen, variant=replace(chosen.variant, proofs=(*chosen.variant.proofs, *fixed)))
    log.add_notes(run_notes.emptied_head_notes(learned.selected.plan, chosen.variant.graph.plan))
    variants = {variant.name: variant for variant in filter(None, (dense, rewritten, chosen.variant))}
    configs: dict[VariantName, EngineConfig] = {"dense": run.built.engine.reference, "compressed": chosen.choice.config}
    evaluated, measured = stages_of(run).finish(variants, configs, scorer, chosen.scored)
    budget, missed = delivered_rows(learned.selected.budget, measured.speeds if run.model.missing is None else ())
    log.add_notes(missed)
    selected = replace(learned.selected, budget=budget)
    generation, steps = deliver_cached(run, selected.plan, graphs.cached, scorer)
    chosen = replace(chosen, variant=replace(chosen.variant, proofs=(*chosen.variant.proofs, *steps)))
    report = make_report(run, selected, dense, chosen, evaluated, measured, graphs.refused, generation)
    return write_output(report, run, selected, dense)


def _compress_graph(run: RunContext, reference: ExportedGraph, selected: SelectedPlan) -> ShrunkGraph:
    """The graph without the units that the plan drops.

    Args:
        run: the run, whose model has the weights of the plan.
        reference: reference graph of the whole model, which is reused with other gates and weights.
        selected: the plan.
    """
    lower = _lowered_sites(run, selected)
    gated = run.export("compressed", selected.plan, template=reference)
    graph = run.shrink(gated, lower=lower, drop_unread=drops_unread(run.recipe.export, run.recipe.engine))
    run.log.add_notes(run_notes.thinned_product_notes(graph))
    run.log.add_notes(run_notes.shared_norm_notes(graph))
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
    """The dense engine with the rewrites of the compressed one; None where there are none, or nothing else was done.

    Args:
        run: the run.
        reference: reference graph of the whole model.
        graph: the graph of the compressed variant.
        selected: the plan.
    """
    engine = run.built.engine
    is_rewritten = graph.thinned or "norm_seconds" in target(engine.reference.target).options
    if not is_rewritten or not (selected.plan.drops_any or engine.chooses):
        return None
    thinned = run.shrink(reference, name="rewritten", drop_unread=drops_unread(run.recipe.export, run.recipe.engine))
    return stages_of(run).build(thinned, engine.reference)


def _build_compressed(run: RunContext, graph: ShrunkGraph, scorer: EvaluationScorer, learned: State) -> ChosenEngine:
    """The engine of the compressed graph: the one that is configured, or the fastest that keeps the metric.

    Args:
        run: the run.
        graph: the graph of the compressed variant.
        scorer: scores engines in comparison with the dense one.
        learned: the plan, and the engine that units were pruned for, if they were.
    """
    if not run.built.engine.chooses:
        return ChosenEngine(stages_of(run).build(graph, run.built.engine), Choice(run.built.engine))
    trials = run.engine_trials(graph, scorer, run.work.scratch)
    if learned.engine is None:
        return choose_engine(trials, None)
    first = replace(learned.engine.choice, in_float=())
    # Units were removed for the first one; another is better than none.
    otherwise = [choice for choice in choices(run.built.engine, has_rows=trials.has_rows) if choice != first]
    chosen = choose_engine(trials, [first], otherwise=otherwise)
    candidates = (row.model_copy(update={"has_all_units": True}) for row in learned.engine.candidates)
    return replace(chosen, candidates=tuple(candidates))


def _quantize_for_target(graph: ShrunkGraph, engine: EngineConfig, data: Data | None, seed: int, log: RunLog) -> None:
    """Write the quantized graph that another machine builds the engine from, since only this one has the rows.

    Args:
        graph: the graph of the compressed variant.
        engine: target and precision, and the number of calibration rows.
        data: the rows; None: nothing is written.
        seed: seed of the draw of calibration rows.
        log: receives the stage, and a note with the difference to the float graph.
    """
    file = target(engine.target).quantized_graph(engine.definite_precision)
    if file is None or data is None:
        return
    rows = calibration_rows(data, engine.calibration_rows, seed)
    with log.stage("compressed: quantizing the graph") as on_progress:
        quantized = quantize_as(file, graph.path, rows, on_progress)
        distance = output_distance(quantized.path, graph.path, rows[:_COMPARED_ROWS])
    text = (
        f"{file} is the graph that compress build makes the engine of {engine.target} in {engine.precision} from; its"
        f" metric was not measured; the mean square of the difference to the outputs in fp32 is {distance:.2g} of"
        " theirs"
    )
    log.add_notes([Note(code=NoteCode.QUANTIZED_FOR_TARGET, text=text)])


def _deliver_rungs(run: RunContext, rungs: Rungs, graphs: Graphs, report: Report, seconds: float) -> None:
    """Deliver slower plans that hold the metric like that of the run, each in a folder, with the page of all.

    Args:
        run: the run, whose output is written.
        rungs: the plans.
        graphs: the graph of the whole model.
        report: the report of the run, whose engine is the last rung.
        seconds: how long the delivery of that engine took.
    """
    max_drop, listed, ended = run.recipe.selection.max_drop, list[Rung](), None
    for name, load in rungs.milder.items():
        if time.perf_counter() + seconds > rungs.deadline:
            ended = f"{name}: no time is left to build it"
            break
        try:
            rung = replace(run, work=run.work.rung(name), log=run.log.separate())
            listed.append(rung_of(name, delivered := _deliver(rung, load(), graphs), max_drop))
            run.log.add_notes([Note(code=NoteCode.RUNG_FINISHED, text=f"rung {name}: {delivered.verdict}")])
        except (CompressorError, GraphPassError) as error:
            shutil.rmtree(run.work.result / LADDER / name, ignore_errors=True)
            ended = f"{name}: {error}"
            break
    listed.append(rung_of(rungs.name, report, max_drop, folder=".."))
    frontier = Frontier(model=report.model, max_drop=max_drop, rungs=tuple(listed), ended=ended)
    frontier_page.write(frontier, run.work.result / LADDER)
    if ended is not None:
        run.log.add_notes([Note(code=NoteCode.LADDER_ENDED, text=frontier.ending)])


def _rehearse(run: RunContext, reference: ExportedGraph) -> Sequence[Refusal]:
    """The groups that cannot be removed from the graph; a plan that is followed is validated when it is shrunk.

    Raises:
        SiteRefusedError: there are some, and units are not selected under a budget, which can leave them whole.
    """
    if run.followed is not None and not any(isinstance(step, Units) for step in run.steps):
        return ()
    rehearsed = rehearse(reference.path, run.model.groups or run.model.sites)
    if any(step.needs_heads for step in run.steps) and not any(step.prunes_groups for step in run.steps):
        require_complete(rehearsed)
    return rehearsed.refused


def _note_plan(run: RunContext, selected: SelectedPlan) -> None:
    """Note how the plan was selected, and how long its masks are."""
    run.log.add_notes(selected.notes)
    run.log.add_notes(run_notes.selection_notes(run.model.folder, selected, run.data))
    learned_row = None if run.blocks is None else run.sizes.longest_row
    run.log.add_notes(run_notes.mask_notes(selected.plan, (*run.sizes.lengths, run.sizes.longest_row), learned_row))
