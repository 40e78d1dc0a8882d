"""The stages that export and deliver the graphs with key/value caches of a model that generates."""

from __future__ import annotations

from pathlib import Path

from compressor.config.run import Recipe
from compressor.config.sections import AUTO, EngineConfig
from compressor.engines.score import EvaluationScorer
from compressor.errors import CompressorError, ErrorCode, UsageError
from compressor.generation.deliver import (
    CachedGraphs,
    count_caches,
    export_whole,
    prove_engines,
    shrink_graphs,
    time_graphs,
)
from compressor.generation.weights import WeightTrials, require_operator
from compressor.generation.workload import Workload
from compressor.model_folder import ModelFolder
from compressor.model_folder.example_inputs import token_limit
from compressor.results import Candidate, Generation, Note, NoteCode, Proof
from compressor.run.run_context import RunContext
from compressor.targets import DEFAULT_TARGET, WEIGHT_BITS, Target, WeightPrecision, target
from compressor.targets.caches import GeneratingModel
from compressor.units import keep_all
from graph_passes import GraphPassError, Plan


def cached_runtime(config: EngineConfig) -> Target:
    """The target that the graphs with caches are delivered for; whether it has engines of them says `Target.caches`."""
    return target(DEFAULT_TARGET if config.target == AUTO else config.target)


def is_engine_of_caches(config: EngineConfig) -> bool:
    """Whether engines with caches are those that a target and a precision name, so that budgets bound their times."""
    has_engines = config.target != AUTO and cached_runtime(config).caches is not None
    return has_engines and config.precision in ("fp32", *WEIGHT_BITS)


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
    recipe, folder, log, out = run.recipe, run.model.folder, run.log, run.work.result
    runtime, threads = cached_runtime(recipe.engine), recipe.engine.threads
    scratch = run.work.scratch / "cached.compressed"
    scratch.mkdir(exist_ok=True)
    try:
        with log.stage("compressed: shrinking the graphs with caches"):
            proofs = shrink_graphs(whole, folder, plan, run.sizes.cases, runtime, scratch, out)
        if runtime.caches is None:
            text = (
                f"engines of {runtime.title} with key/value caches are not built here: build them from"
                f" {' and '.join(whole.files)}, which take and return keys and values"
            )
            log.add_notes([Note(code=NoteCode.CACHED_ENGINE_MISSING, text=text)])
            return count_caches(whole, out, workload), (whole.proof, *proofs)
        with log.stage("compressed: building the engines with caches"):
            runtime.build_sessions(out, whole.files, workload.contexts, threads)
            engines = prove_engines(out, run.sizes.cases, runtime, threads)
    except (CompressorError, GraphPassError) as error:
        if recipe.engine.weight_precision is not None:
            raise
        graphs = (file for name in whole.files for file in out.glob(f"{Path(name).stem}.*onnx*"))
        for file in {*graphs, *runtime.session_files(out)}:
            file.unlink()
        _note_missing(run, error)
        return None, ()
    candidates = _round_weights(run, workload, scorer)
    if (reason := runtime.write_library_files(out, _described(folder))) is not None:
        log.add_notes([Note(code=NoteCode.LIBRARY_LIMITED, text=f"{runtime.library} and this folder: {reason}")])
    generation = time_graphs(
        whole,
        out,
        runtime,
        workload,
        threads,
        seconds=recipe.measure.seconds,
        seed=recipe.selection.seed,
        log=log,
    )
    rounded = next((row.proofs for row in candidates if row.chosen), ())
    return generation.model_copy(update={"candidates": candidates}), (whole.proof, *proofs, engines, *rounded)


def _described(folder: ModelFolder) -> GeneratingModel:
    """What libraries that generate have to know of a model."""
    config, generation = folder.model.config, folder.model.generation_config
    tokenizer = getattr(folder.processor, "tokenizer", folder.processor)
    return GeneratingModel(config.to_dict(), generation.to_dict(), token_limit(folder.model), tokenizer)


def _round_weights(run: RunContext, workload: Workload, scorer: EvaluationScorer) -> tuple[Candidate, ...]:
    """Round the weights of the engine with caches, in the precision of the recipe or in the fastest that holds.

    Returns:
        Every precision that was tried; nothing where the weights stay in floats.
    """
    precisions = _weight_precisions(run.recipe, scorer)
    if not precisions:
        return ()
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
