"""The stages that export and deliver the graphs with key/value caches of a model that generates."""

from __future__ import annotations

from pathlib import Path

from compressor.config.sections import EngineConfig
from compressor.errors import CompressorError
from compressor.generation.deliver import (
    CachedGraphs,
    build_engines,
    export_whole,
    prove_engines,
    shrink_graphs,
    time_graphs,
)
from compressor.results import Generation, Note, NoteCode, Proof
from compressor.run.run_context import RunContext
from compressor.targets import DEFAULT_TARGET
from compressor.units import keep_all
from graph_passes import GraphPassError, Plan


def is_engine_of_caches(config: EngineConfig) -> bool:
    """Whether the graphs with caches have engines of a target and precision."""
    return (config.target, config.precision) == (DEFAULT_TARGET, "fp32")


def export_cached(run: RunContext) -> CachedGraphs | None:
    """Export the whole model with caches.

    Returns:
        Its graphs; None where the model does not generate or the recipe wants no cache, or where it cannot be exported
        with caches, for which there is a note with the reason.
    """
    config, folder = run.recipe.export, run.model.folder
    if run.sizes.workload is None:
        return None
    out = run.work.scratch / "cached"
    out.mkdir(exist_ok=True)
    plan = keep_all(run.model.groups or run.model.sites)
    try:
        with run.log.stage("dense: exporting the graphs with caches"):
            return export_whole(folder, plan, run.sizes.cases, out, opset=config.opset, attention=config.attention)
    except (CompressorError, GraphPassError) as error:
        _note_missing(run, error)
        return None


def deliver_cached(
    run: RunContext, plan: Plan, whole: CachedGraphs | None
) -> tuple[Generation | None, tuple[Proof, ...]]:
    """Write the graphs that generate text beside the engine, proven and timed.

    Args:
        run: the run, whose model has the weights of the plan.
        plan: the plan.
        whole: the graphs of the whole model; None: there are none.

    Returns:
        What was written and measured, and the proofs. Nothing where the graphs cannot lose what the plan drops, for
        which there is a note with the reason.
    """
    workload = run.sizes.workload
    if whole is None or workload is None:
        return None, ()
    recipe, folder, log, out = run.recipe, run.model.folder, run.log, run.work.result
    scratch = run.work.scratch / "cached.compressed"
    scratch.mkdir(exist_ok=True)
    try:
        with log.stage("compressed: shrinking the graphs with caches"):
            proofs = shrink_graphs(whole, folder, plan, run.sizes.cases, scratch, out)
        with log.stage("compressed: building the engines with caches"):
            build_engines(whole.files, out, workload.contexts, recipe.engine.threads)
            engines = prove_engines(out, run.sizes.cases, recipe.engine.threads)
    except (CompressorError, GraphPassError) as error:
        for file in (file for name in whole.files for file in out.glob(f"{Path(name).stem}.*onnx*")):
            file.unlink()
        _note_missing(run, error)
        return None, ()
    generation = time_graphs(
        whole,
        out,
        workload,
        recipe.engine.threads,
        seconds=recipe.measure.seconds,
        seed=recipe.selection.seed,
        log=log,
    )
    return generation, (whole.proof, *proofs, engines)


def _note_missing(run: RunContext, error: Exception) -> None:
    """Note that the output has no graphs that generate text."""
    text = f"the folder has no graphs that generate text, only one that reads a whole text at once: {error}"
    run.log.add_notes([Note(code=NoteCode.NO_CACHE, text=text)])
