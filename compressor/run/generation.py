"""The stages that export and deliver the graphs with key/value caches of a model that generates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compressor.config.run import Recipe
from compressor.config.sections import AUTO, EngineConfig
from compressor.engines.build import Variant
from compressor.engines.choose import ChosenEngine
from compressor.engines.prove import Case
from compressor.engines.score import EvaluationScorer
from compressor.errors import CompressorError, ErrorCode, UsageError
from compressor.model_folder import ModelFolder
from compressor.model_folder.files import CONFIG, GENERATION, read_json
from compressor.model_folder.text_limits import token_limit
from compressor.results import Candidate, Generation, Note, NoteCode, Proof
from compressor.run.run_context import RunContext
from compressor.targets import DEFAULT_TARGET, TARGETS, WEIGHT_BITS, Target, WeightPrecision, target
from compressor.targets.caches import GeneratingModel
from compressor.units import keep_all
from graph_passes import GraphPassError, Plan

if TYPE_CHECKING:  # what exports graphs with caches needs PyTorch
    from compressor.generation.deliver import CachedGraphs
    from compressor.generation.workload import CachedEngine, Workload

_REFUSALS = (
    ErrorCode.UNSUPPORTED_MODEL,
    ErrorCode.EXPORT_FAILED,
    ErrorCode.PLAN_MISMATCH,
    ErrorCode.SITE_REFUSED,
)
"""Codes of errors that name what graphs with caches cannot have."""
EXPORT_STAGE = "dense: exporting the graphs with caches"
"""The stage of `export_cached`."""


def cached_runtime(config: EngineConfig) -> Target:
    """The target that the graphs with caches are delivered for; whether it has engines of them says `Target.caches`."""
    return target(DEFAULT_TARGET if config.target == AUTO else config.target)


def is_engine_of_caches(config: EngineConfig) -> bool:
    """Whether engines with caches are those that a target and a precision name, so that budgets bound their times.

    Where the precision is to be chosen, they are in fp32, or their weights have the precision that is chosen for them.
    """
    return cached_runtime(config).caches is not None and config.precision in ("fp32", *WEIGHT_BITS, AUTO)


def require_weights(recipe: Recipe, folder: ModelFolder) -> None:
    """Check that the weights of a model can be rounded, where a recipe names a precision of weights alone.

    Raises:
        UsageError: they cannot: on another runtime or device, or without an engine with caches.
        TargetMissingError: the installed runtime cannot multiply by them.
    """
    engine = recipe.engine
    if engine.weight_precision is None:
        return
    fields, reason, runtime = ("precision", "target"), "", cached_runtime(engine)
    if runtime.caches is None:
        named = " or ".join(name for name in TARGETS if target(name).caches is not None)
        reason = (
            f"it rounds the weights of engines with key/value caches, and none of {runtime.title} are built here; use"
            f" --target {named}, or --precision int8"
        )
    elif engine.provider == "cuda":
        fields, reason = ("precision", "provider"), "engines with caches are built for the CPU; omit --provider"
    elif not folder.generates:
        fields = ("precision", "model")
        reason = "it rounds the weights of models that generate text, and this one does not; use --precision int8"
    elif recipe.export.no_cache:
        fields, reason = ("precision", "no_cache"), "the weights of the engine with caches are rounded; omit --no-cache"
    if reason:
        raise UsageError(
            f"--precision {engine.precision}: {reason}",
            code=ErrorCode.CONTRADICTION,
            fields=fields,
            value=engine.precision,
        )
    from compressor.generation.weights import require_rounded

    require_rounded(runtime)


def export_cached(run: RunContext) -> CachedGraphs | None:
    """Export the whole model with caches.

    Returns:
        Its graphs; None where the model does not generate or the recipe wants no cache, or where its export with caches
        is refused, for which there is a note with the reason.

    Raises:
        CompressorError: the graphs compute something else than the model; or the export is refused, and the recipe
            wants the weights of these graphs rounded.
    """
    config, folder = run.recipe.export, run.model.folder
    if run.sizes.workload is None:
        return None
    from compressor.generation.deliver import export_whole

    out = run.work.scratch / "cached"
    out.mkdir(exist_ok=True)
    plan = keep_all(run.model.groups or run.model.sites)
    with _refusal_noted(run), run.log.stage(EXPORT_STAGE):
        return export_whole(folder, plan, run.sizes.cases, out, opset=config.opset, attention=config.attention)
    return None


@dataclass(frozen=True)
class Delivered:
    """What a run delivers beside the engine that reads whole texts, and what its metric is measured with.

    Attributes:
        scored: the dense and the compressed variant, with engines with caches where the task is one of models that
            generate.
        scorer: scores engines on the evaluation rows, in comparison with the dense one of `scored`.
        generation: the graphs with caches; None: there are none.
        proofs: their proofs.
    """

    scored: tuple[Variant, Variant]
    scorer: EvaluationScorer
    generation: Generation | None = None
    proofs: tuple[Proof, ...] = ()


def deliver_cached(
    run: RunContext,
    plan: Plan,
    whole: CachedGraphs | None,
    dense: Variant,
    chosen: ChosenEngine,
    scorer: EvaluationScorer,
) -> Delivered:
    """Write the graphs that generate text beside the engine, proven and timed; the model has the weights of the plan.

    Args:
        whole: the graphs of the whole model; None: there are none.
        dense: the dense variant, whose engine reads whole texts, as that of `chosen` does.
        scorer: scores engines on the evaluation rows, in comparison with the dense one.

    Returns:
        What was delivered. There are no graphs with caches if these cannot lose what the plan drops, for which there is
        a note with the reason.

    Raises:
        CompressorError: a proof does not hold, or an engine cannot be built; or the graphs cannot lose what the plan
            drops, and the recipe wants their weights rounded.
    """
    reads_whole, proofs = Delivered((dense, chosen.variant), scorer), list[Proof]()
    workload, threads, log, out = run.sizes.workload, run.recipe.engine.threads, run.log, run.work.result
    if whole is None or workload is None:
        return reads_whole
    from compressor.generation import deliver
    from compressor.generation.prove import prove_engines

    runtime = cached_runtime(run.recipe.engine)
    with _refusal_noted(run):
        proofs += [whole.proof, *_shrink_graphs(run, plan, whole)]
    if not proofs:
        return reads_whole
    if runtime.caches is None:
        text = (
            f"this run builds no engines of {runtime.title} with key/value caches: build them from"
            f" {' and '.join(whole.files)}, which take and return keys and values"
        )
        log.add_notes([Note(code=NoteCode.CACHED_ENGINE_MISSING, text=text)])
        return replace(reads_whole, generation=deliver.count_caches(whole, out, workload), proofs=tuple(proofs))
    with log.stage("compressed: building the engines with caches"):
        runtime.build_sessions(out, whole.files, workload.contexts, threads)
        proofs.append(prove_engines(out, whole.texts, runtime, threads, "compressed", whole.tolerance))
    with log.stage("dense: building the engines with caches"):
        whole_engine = deliver.dense_engines(whole, runtime, workload, threads)
        proofs.append(prove_engines(whole_engine.path.parent, whole.texts, runtime, threads, "dense", whole.tolerance))
    is_scored = _scores_caches(run, chosen.choice.config)
    if is_scored:
        dense = replace(dense, engine=whole_engine)
        scorer = run.stages.scorer(dense)
    candidates = _round_weights(run, whole.texts, workload, scorer)
    if (reason := runtime.write_library_files(out, _described(run.model.folder))) is not None:
        log.add_notes([Note(code=NoteCode.LIBRARY_LIMITED, text=f"{runtime.library} and this folder: {reason}")])
    engines = whole_engine, deliver.open_engines(runtime, out, threads)
    seconds, seed = run.recipe.measure.seconds, run.recipe.selection.seed
    generation = deliver.time_graphs(whole, engines, workload, seconds=seconds, seed=seed, log=log)
    generation = generation.model_copy(update={"candidates": candidates, "is_scored": is_scored})
    rounded = next((row.proofs for row in candidates if row.chosen), ())
    compressed = replace(chosen.variant, engine=engines[1]) if is_scored else chosen.variant
    return Delivered((dense, compressed), scorer, generation, (*proofs, *rounded))


def _scores_caches(run: RunContext, config: EngineConfig) -> bool:
    """Whether the metric is that of the engines with caches: those of the configuration that is delivered."""
    engine, generates = run.recipe.engine, run.data is not None and run.data.task.generates
    serves = is_engine_of_caches(config) and config.target == cached_runtime(engine).name
    return generates and serves and engine.provider != "cuda"


def rounded_engine(run: RunContext, plan: Plan, whole: CachedGraphs) -> CachedEngine:
    """The engine with caches of a plan, all of whose decoder's weights are rounded as the recipe wants it.

    The model has the weights of the plan; the engine is written into the folder of the run.

    Raises:
        CompressorError: a proof does not hold, or the engine cannot be built.
        GraphPassError: the graphs cannot lose what the plan drops.
    """
    from compressor.generation.weights import Rounding, build_rounded
    from compressor.generation.workload import CachedEngine

    workload, threads, out = run.sizes.workload, run.recipe.engine.threads, run.work.result
    assert workload is not None
    runtime, rounding = cached_runtime(run.recipe.engine), Rounding(run.recipe.engine.weight_precision)
    _shrink_graphs(run, plan, whole)
    with run.log.stage("compressed: building the engines with caches"):
        runtime.build_sessions(out, whole.files, workload.contexts, threads)
        rounded = run.work.scratch / "cached.rounded"
        rounded.mkdir()
        return CachedEngine.of(build_rounded(out, runtime, rounding, whole.texts, threads, rounded)[0])


def _shrink_graphs(run: RunContext, plan: Plan, whole: CachedGraphs) -> tuple[Proof, ...]:
    """Write the graphs with caches of a plan, whose weights the model has, into the folder of the run; their proofs."""
    from compressor.generation.deliver import shrink_graphs

    scratch = run.work.scratch / "cached.compressed"
    scratch.mkdir(exist_ok=True)
    with run.log.stage("compressed: shrinking the graphs with caches"):
        runtime = cached_runtime(run.recipe.engine)
        return shrink_graphs(whole, run.model.folder, plan, runtime, scratch, run.work.result)


def _described(folder: ModelFolder) -> GeneratingModel:
    """What libraries that generate have to know of a model."""
    if folder.file is None:
        config, generation = folder.model.config.to_dict(), folder.model.generation_config.to_dict()
    else:
        files = (folder.path / name for name in (CONFIG, GENERATION))
        config, generation = (read_json(file) if file.is_file() else {} for file in files)
    tokenizer = getattr(folder.processor, "tokenizer", folder.processor)
    return GeneratingModel(config, generation, token_limit(folder.model), tokenizer)


def _round_weights(
    run: RunContext, texts: Sequence[Case], workload: Workload, scorer: EvaluationScorer
) -> tuple[Candidate, ...]:
    """Round the weights of the engine with caches, as the recipe says or the fastest that holds; what was tried."""
    precisions = _weight_precisions(run.recipe, scorer)
    if not precisions:
        return ()
    from compressor.generation.weights import WeightTrials

    scratch = run.work.scratch / "cached.rounded"
    scratch.mkdir(exist_ok=True)
    trials = WeightTrials(
        folder=run.work.result,
        runtime=cached_runtime(run.recipe.engine),
        texts=texts,
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
    tries = engine.precision == AUTO and engine.provider != "cuda" and cached_runtime(engine).caches is not None
    return (None, *WEIGHT_BITS) if tries and is_bounded else ()


@contextlib.contextmanager
def _refusal_noted(run: RunContext) -> Iterator[None]:
    """Inside, a refusal of the graphs with caches ends the block with a note, unless the recipe wants them."""
    try:
        yield
    except (CompressorError, GraphPassError) as error:
        is_refusal = isinstance(error, GraphPassError) or error.code in _REFUSALS
        if not is_refusal or run.recipe.engine.weight_precision is not None:
            raise
        text = f"the folder has no graphs that generate text, only one that reads a whole text at once: {error}"
        run.log.add_notes([Note(code=NoteCode.NO_CACHE, text=text)])
