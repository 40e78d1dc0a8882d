"""The stages that export and deliver the graphs with key/value caches of a model that generates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from compressor.config.run import Recipe
from compressor.config.sections import AUTO, EngineConfig
from compressor.engines.score import EvaluationScorer
from compressor.errors import CompressorError, ErrorCode, UsageError
from compressor.model_folder import ModelFolder
from compressor.results import Candidate, Generation, Note, NoteCode, Proof
from compressor.run.run_context import RunContext
from compressor.targets import DEFAULT_TARGET, WEIGHT_BITS, WeightPrecision
from compressor.units import keep_all
from graph_passes import GraphPassError, Plan

if TYPE_CHECKING:  # what exports graphs with caches needs PyTorch
    from compressor.generation.deliver import CachedGraphs
    from compressor.generation.workload import Workload


def is_engine_of_caches(config: EngineConfig) -> bool:
    """Whether the graphs with caches have engines of a target and precision."""
    return config.target == DEFAULT_TARGET and config.precision in ("fp32", *WEIGHT_BITS)


def require_weights(recipe: Recipe, folder: ModelFolder) -> None:
    """Check that the weights of a model can be rounded, where a recipe names a precision of weights alone.

    Raises:
        UsageError: they cannot: on another runtime or device, or without an engine with caches.
        TargetMissingError: the installed ONNX Runtime lacks the operator.
    """
    engine = recipe.engine
    if engine.weight_precision is None:
        return
    fields, reason = ("precision", "target"), ""
    if engine.target not in (DEFAULT_TARGET, AUTO):
        reason = "ONNX Runtime alone multiplies by such weights; use --target ort, or --precision int8"
    elif engine.provider == "cuda":
        fields, reason = ("precision", "provider"), "engines with caches are built for the CPU; omit --provider"
    elif not folder.generates:
        fields = ("precision", "model")
        reason = "weights alone are rounded where a model generates text, which this one does not; use --precision int8"
    elif recipe.export.no_cache:
        fields, reason = ("precision", "no_cache"), "the weights of the engine with caches are rounded; omit --no-cache"
    if reason:
        raise UsageError(
            f"--precision {engine.precision}: {reason}",
            code=ErrorCode.CONTRADICTION,
            fields=fields,
            value=engine.precision,
        )
    from compressor.generation.weights import require_operator

    require_operator()


def export_cached(run: RunContext) -> CachedGraphs | None:
    """Export the whole model with caches.

    Returns:
        Its graphs; None where the model does not generate or the recipe wants no cache, or where it cannot be exported
        with caches, for which there is a note with the reason.

    Raises:
        CompressorError: it cannot be exported with caches, whose weights the recipe wants rounded.
    """
    config, folder = run.recipe.export, run.model.folder
    if run.sizes.workload is None:
        return None
    from compressor.generation.deliver import export_whole

    out = run.work.scratch / "cached"
    out.mkdir(exist_ok=True)
    plan = keep_all(run.model.groups or run.model.sites)
    try:
        with run.log.stage("dense: exporting the graphs with caches"):
            return export_whole(folder, plan, run.sizes.cases, out, opset=config.opset, attention=config.attention)
    except (CompressorError, GraphPassError) as error:
        if run.recipe.engine.weight_precision is not None:
            raise
        _note_missing(run, error)
        return None


def deliver_cached(
    run: RunContext, plan: Plan, whole: CachedGraphs | None, scorer: EvaluationScorer
) -> tuple[Generation | None, tuple[Proof, ...]]:
    """Write the graphs that generate text beside the engine, proven and timed.

    Args:
        run: the run, whose model has the weights of the plan.
        plan: the plan.
        whole: the graphs of the whole model; None: there are none.
        scorer: scores engines with rounded weights, in comparison with the dense engine.

    Returns:
        What was written and measured, and the proofs. Nothing where the graphs cannot lose what the plan drops, for
        which there is a note with the reason.

    Raises:
        CompressorError: the recipe wants rounded weights, and no engine with them can be built and proven.
    """
    workload = run.sizes.workload
    if whole is None or workload is None:
        return None, ()
    from compressor.generation.deliver import build_engines, prove_engines, shrink_graphs, time_graphs

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
        if recipe.engine.weight_precision is not None:
            raise
        for file in (file for name in whole.files for file in out.glob(f"{Path(name).stem}.*onnx*")):
            file.unlink()
        _note_missing(run, error)
        return None, ()
    candidates = _round_weights(run, workload, scorer)
    generation = time_graphs(
        whole,
        out,
        workload,
        recipe.engine.threads,
        seconds=recipe.measure.seconds,
        seed=recipe.selection.seed,
        log=log,
    )
    rounded = next((row.proofs for row in candidates if row.chosen), ())
    return generation.model_copy(update={"candidates": candidates}), (whole.proof, *proofs, engines, *rounded)


def _round_weights(run: RunContext, workload: Workload, scorer: EvaluationScorer) -> tuple[Candidate, ...]:
    """Round the weights of the engine with caches, in the precision of the recipe or in the fastest that holds.

    Returns:
        Every precision that was tried; nothing where the weights stay in floats.
    """
    precisions = _weight_precisions(run.recipe, scorer)
    if not precisions:
        return ()
    from compressor.generation.weights import WeightTrials

    scratch = run.work.scratch / "cached.rounded"
    scratch.mkdir(exist_ok=True)
    trials = WeightTrials(
        folder=run.work.result,
        cases=run.sizes.cases,
        scorer=scorer,
        workload=workload,
        threads=run.recipe.engine.threads,
        seconds=run.recipe.measure.seconds,
        scratch=scratch,
        log=run.log,
    )
    return trials.choose(precisions)


def _weight_precisions(recipe: Recipe, scorer: EvaluationScorer) -> tuple[WeightPrecision | None, ...]:
    """The precisions of weights to try; None: floats. A run chooses one only where `--max-drop` bounds the loss."""
    engine, data = recipe.engine, scorer.data
    if engine.weight_precision is not None:
        return (engine.weight_precision,)
    is_bounded = scorer.max_drop is not None and data is not None and data.scores_eval
    tries = engine.precision == AUTO and engine.target in (DEFAULT_TARGET, AUTO) and engine.provider != "cuda"
    return (None, *WEIGHT_BITS) if tries and is_bounded else ()


def _note_missing(run: RunContext, error: Exception) -> None:
    """Note that the output has no graphs that generate text."""
    text = f"the folder has no graphs that generate text, only one that reads a whole text at once: {error}"
    run.log.add_notes([Note(code=NoteCode.NO_CACHE, text=text)])
