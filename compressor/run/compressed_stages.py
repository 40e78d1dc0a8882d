"""The stages that make the compressed engine of a run: its graph, its engine, and what both are compared with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from compressor.config.sections import EngineConfig
from compressor.engines.build import ExportedGraph, ShrunkGraph, Variant, drops_unread
from compressor.engines.choices import Choice, choices
from compressor.engines.choose import ChosenEngine, choose_engine
from compressor.engines.quantize import quantize_as
from compressor.engines.score import EvaluationScorer
from compressor.progress import RunLog
from compressor.quantization import output_distance
from compressor.results import Note, NoteCode
from compressor.run import run_notes
from compressor.run.run_context import RunContext, SelectedPlan
from compressor.run.steps.base import State
from compressor.targets import DEFAULT_TARGET, target
from compressor.tasks import Data
from compressor.tasks.calibration import calibration_rows

_COMPARED_ROWS = 32
"""Calibration rows on which a quantized graph is compared with its float graph."""


def compress_graph(run: RunContext, reference: ExportedGraph, selected: SelectedPlan) -> ShrunkGraph:
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


def build_rewritten(
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
    return run.build(thinned, engine.reference)


def build_compressed(run: RunContext, graph: ShrunkGraph, scorer: EvaluationScorer, learned: State) -> ChosenEngine:
    """The engine of the compressed graph: the one that is configured, or the fastest that keeps the metric.

    Args:
        run: the run.
        graph: the graph of the compressed variant.
        scorer: scores engines in comparison with the dense one.
        learned: the plan, and the engine that units were pruned for, if they were.
    """
    if not run.built.engine.chooses:
        return ChosenEngine(run.build(graph, run.built.engine), Choice(run.built.engine))
    trials = run.engine_trials(graph, scorer, run.work.scratch)
    if learned.engine is None:
        return choose_engine(trials, None)
    first = replace(learned.engine.choice, in_float=())
    # Units were removed for the first one; another is better than none.
    otherwise = [choice for choice in choices(run.built.engine, has_rows=trials.has_rows) if choice != first]
    chosen = choose_engine(trials, [first], otherwise=otherwise)
    candidates = (row.model_copy(update={"has_all_units": True}) for row in learned.engine.candidates)
    return replace(chosen, candidates=tuple(candidates))


def quantize_for_target(graph: ShrunkGraph, engine: EngineConfig, data: Data | None, seed: int, log: RunLog) -> None:
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
