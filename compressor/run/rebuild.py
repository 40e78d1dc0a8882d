"""The folder of a finished run, whose engine is built, proven and measured for another target or machine.

Only the output folder of the run is needed. Where the model and the rows of the run are on this machine too, and
PyTorch, which reads a model folder, the metric is measured on the engines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor import report as reports
from compressor.config.fields import extra_of
from compressor.config.run import BUILD_FIELDS, FIELDS, Recipe, definite_fields
from compressor.config.sections import AUTO, ROW_SOURCES, EngineConfig, ExportConfig, SourceConfig, graph_of
from compressor.config.tasks import is_own_task
from compressor.engines.build import ShrunkGraph, Variant
from compressor.engines.choices import DYNAMIC, MIXED, PORTABLE, SYMMETRIC, Choice
from compressor.engines.matmul_times import MatmulTimes
from compressor.engines.prove import Case, Inputs, make_cases, proven_shapes
from compressor.environment import has_pytorch, machine, require_pytorch
from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.measure import require_run
from compressor.model_folder import example_feeds
from compressor.model_folder.text_limits import token_limit
from compressor.progress import Listener, RunLog
from compressor.results import (
    CACHED_STAGES,
    BudgetRow,
    CostShare,
    DropStatus,
    Generation,
    Note,
    NoteCode,
    Proof,
    ProofStage,
    Report,
    Size,
    VariantName,
    headline_scores,
)
from compressor.run import run_notes
from compressor.run.generation import EXPORT_STAGE
from compressor.run.stages import Results, Stages, build_options, drop_status, row_cases
from compressor.targets import QUANTIZED, TARGETS, WEIGHT_BITS, BuildOptions, Target, cached_target, target
from compressor.targets.caches import DECODER, ENCODER, GeneratingModel
from compressor.targets.graph_facts import graph_digest
from compressor.targets.trial_inputs import draws_ids, fixed_batch, trial_feeds
from compressor.units import keep_all
from compressor.workdir import QUANTIZED_GRAPHS, link_library_files, locked
from graph_passes import GraphPassError, load
from graph_passes.block_sparse.masks import REACH

if TYPE_CHECKING:
    from compressor.generation.workload import Workload
    from compressor.model_folder import ModelFolder
    from compressor.tasks import Data

_OF_GRAPHS = (ProofStage.EXPORT, ProofStage.SHRINK, ProofStage.FIXED_SHAPE, *CACHED_STAGES[:2])
"""Stages of the proofs of graphs, which hold whatever engine is built from them."""
_OF_CACHED_ENGINES = CACHED_STAGES[2:]
"""Stages of the proofs of engines with caches."""
_WITHOUT_ENGINE: Mapping[str, Any] = {
    **dict.fromkeys(("file", "peak_memory_bytes", "built")),
    **dict.fromkeys(("attentions", "fused"), 0),
    "optimization": "not built",
}
"""Facts about an engine, rather than its graph, where no engine was built."""
_OF_THE_ENGINE = """
target-missing rows-missing no-dense-graph timed-alone files-kept speed-uncertain answers-unchanged memory-unmeasured
times-drifted engine-chosen engines-compared-whole loss-unbounded positions-uncertain kernel-unused quantized-for-target
masks-longer random-inputs
"""
"""Codes of notes on an engine and its measurements, which those of another engine replace."""
_OF_QUANTIZED_GRAPHS = "products-in-float outlier-ranges few-calibration-rows no-int8-instructions"
"""Codes of notes on a quantized graph, which say nothing of an engine in floats."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, as far as it decides how its engine is built.

    Attributes:
        report: the report of the run.
        recipe: the fields of its recipe that concern the build, with those that are requested now.
        graphs: the proven graph of each variant, dense first; the dense graph only where the folder has it.
        lengths: lengths to time, in tokens.
        cases: inputs of the proofs.
        inputs: makes up a batch of inputs of the graph, from (batch size, length, seed).
        mask_reach: positions that the masks of the plan cover; None: no masks.
    """

    report: Report
    recipe: Recipe
    graphs: Mapping[VariantName, Path]
    lengths: tuple[int | None, ...]
    cases: tuple[Case, ...]
    inputs: Inputs
    mask_reach: int | None


def load_run(out: Path, fields: Mapping[str, Any]) -> FinishedRun:
    """Read the folder of a run, and check that its graphs are the proven ones; `fields` replace those of its recipe.

    Raises:
        UsageError: a field is out of its range.
        InputError: a file is missing, or is not the one that the run wrote.
    """
    report = reports.load(out)
    recipe = _recipe(report, fields)
    engine = recipe.engine
    engine.require_definite()
    named: dict[VariantName, Path] = {"compressed": out / "model.onnx", "dense": out / "dense.onnx"}
    for name, path in named.items():
        if not path.is_file() and (name == "compressed" or path.name in report.graphs):
            text = f"{path}: missing; copy the whole folder of the run"
            raise InputError(text, code=ErrorCode.FILE_MISSING, path=path)
        _require_proven(path, report)
    graphs = {name: named[name] for name in reversed(named) if named[name].is_file()}
    if (file := quantized_source(report, engine)) is not None and not (out / file).is_file():
        raise InputError(
            f"{out / file}: missing, and {engine.target} runs in {engine.precision} only a graph that is quantized; run"
            f" compress --target {engine.target} --precision {engine.precision} with rows first",
            code=ErrorCode.FILE_MISSING,
            path=out / file,
        )
    for source in filter(None, (file, *target(engine.target).sources(engine.definite_precision))):
        _require_proven(out / source, report)
    timed: tuple[int | None, ...] = tuple(dict.fromkeys(row.seq for row in report.speeds))
    lengths = recipe.measure.seq or timed or (128,)
    longest = max(seq or 1 for seq in (*lengths, *(seq for _, seq in engine.parsed_shapes)))
    shapes = (*engine.parsed_shapes, *proven_shapes(recipe.measure.batch, lengths))
    graph = load(graphs["compressed"])
    batch_size = fixed_batch(graph)

    def inputs(batch: int, seq: int, seed: int) -> dict[str, np.ndarray]:
        return trial_feeds(graph, batch_size or batch, seq, seed=seed, padded=batch > 1)

    reach = min(json.loads(graph.metadata_props.get(REACH, "{}")).values(), default=None)
    cases = make_cases(inputs, maximum_length=longest, mask_reach=reach, shapes=shapes)
    return FinishedRun(report, recipe, graphs, lengths, cases, inputs, reach)


def _require_proven(path: Path, report: Report) -> None:
    """Raise InputError unless a graph is the one that the run proved, or is missing."""
    if path.is_file() and report.graphs.get(path.name) not in (None, graph_digest(path)):
        text = f"{path}: not the graph that the run proved; copy the whole folder of the run again"
        raise InputError(text, code=ErrorCode.FILE_MISMATCH, path=path)


def quantized_source(report: Report, engine: EngineConfig) -> str | None:
    """The name of the quantized graph of a run that an engine is built from; None: a graph in floats.

    The engine that the run delivered is built in its form, also by a target that could quantize the float graph itself.
    """
    runtime, precision = target(engine.target), engine.definite_precision
    delivered = {f"{engine.target} {precision} {form}" for form in (PORTABLE, SYMMETRIC)}
    form, _, _ = (report.delivered or "").partition(",")  # products that returned to floats follow
    needs_graph = form in delivered or runtime.sources(precision)[0] is not None
    return runtime.quantized_graph(precision) if needs_graph else None


def _engine_sources(run: FinishedRun) -> list[str | None]:
    """Names of the graphs that the engine of a run can be built from, in the order to try them; None: floats."""
    engine, folder = run.recipe.engine, run.graphs["compressed"].parent
    sources = target(engine.target).sources(engine.definite_precision)
    usable = [file for file in sources if file is None or (folder / file).is_file()]
    return list(dict.fromkeys((quantized_source(run.report, engine), *usable)))


def _recipe(report: Report, fields: Mapping[str, Any]) -> Recipe:
    """The fields of a run's recipe that concern the build, replaced by those of `fields`."""
    stored = definite_fields(report)
    # The folder may come from elsewhere, and a library is code: only the command line may name one.
    kept = {
        name: value
        for name, value in stored.items()
        if name in BUILD_FIELDS and value is not None and not extra_of(FIELDS[name], "runs_code")
    }
    if "target" in fields and fields["target"] != kept.get("target"):
        kept = {name: kept[name] for name in kept if name in ("batch", "seq", "seconds")}
    settings = {name: stored.get(name, FIELDS[name].default) for name in ("seed", "report_rows", "batch_size")}
    recipe = Recipe(**{**kept, **fields, "model": Path(os.devnull), **settings})
    return recipe.updated(max_drop=report.recipe.get("max_drop"))


def _is_of_engine(row: BudgetRow | CostShare, cached: _Cached | None) -> bool:
    """Whether a row is a time of an engine that a build replaces."""
    return row.unit == "ms" and (row.phase is None or cached is not None)


def _lasting_notes(run: FinishedRun, results: Results, cached: _Cached | None) -> list[Note]:
    """The notes of a run that a build of its engine does not replace."""
    before, outdated = run.report, set(map(NoteCode, _OF_THE_ENGINE.split()))
    if cached is not None:
        outdated |= {NoteCode.CACHED_ENGINE_MISSING, NoteCode.LIBRARY_LIMITED}
    if before.generation is not None and before.generation.precision in WEIGHT_BITS:
        outdated -= {NoteCode.LOSS_UNBOUNDED, NoteCode.PRODUCTS_IN_FLOAT}
    elif run.recipe.engine.precision not in QUANTIZED:
        outdated.update(map(NoteCode, _OF_QUANTIZED_GRAPHS.split()))
    if results.embeddings is not None:
        outdated.add(NoteCode.EMBEDDINGS_CHANGED)
    if any(_is_of_engine(row, cached) for row in before.budget):
        outdated |= {NoteCode.BUDGET_MET, NoteCode.BUDGET_MISSED}
    return [note for note in before.notes if note.code not in outdated]


def rebuild(out: Path, fields: Mapping[str, Any], listener: Listener) -> Report:
    """Build the engine of a run's folder, and write it with a new report once every proof holds.

    Some fields of the recipe, among `BUILD_FIELDS`, replace those of the run.

    Raises:
        UsageError: a field is out of its range.
        InputError: no run wrote the folder, its graph is not the proven one, or a size to time exceeds what the model
            takes.
        TargetMissingError: the runtime or its device is missing.
        MismatchError: the engine computes something else than the graph.

    After any error the folder is unchanged.
    """
    run = load_run(out, fields)
    engine = run.recipe.engine
    runtime = target(engine.target)
    runtime.check(precision=engine.definite_precision, provider=engine.provider, kernel=engine.kernel)
    log = RunLog(listener)
    _note_what_to_expect(run, log)
    with locked(out), tempfile.TemporaryDirectory(prefix=".build-", dir=out) as folder:
        scratch = Path(folder)
        if (data := _read_rows(run, scratch, log)) is not None:
            run = replace(run, cases=(*run.cases, *row_cases(data, run.inputs, longest=run.mask_reach)))
        options = build_options(run.recipe, run.lengths, [case.feeds for case in run.cases], data)
        graph, sizes = load(run.graphs["compressed"]), itertools.product(run.recipe.measure.batch, run.lengths)
        inputs = {Size(batch, seq): trial_feeds(graph, batch, seq or 1) for batch, seq in sizes}
        stages = Stages(run.recipe, data, run.cases, options, inputs, scratch, log)
        chose = run.report.recipe.get("precision") == AUTO and "precision" not in fields
        # On the machine of the run, an engine in int8 alone was measured to be faster than a mix.
        is_here = machine()["processor"] == run.report.machine.get("processor")
        is_mixed = MIXED in (run.report.delivered or "") or not is_here
        products = MatmulTimes(list(inputs.values()), log) if chose and is_mixed else None
        variants = {name: _build(name, run, stages, products) for name in run.graphs}
        for variant in variants.values():
            for (batch, seq, _), feeds in inputs.items():
                require_run(variant.engine, variant.graph.path, feeds, batch, seq or 1)
        cached = _build_cached(run, scratch, log)
        results = stages.finish(variants, {"dense": engine.reference, "compressed": engine})
        lost = bool((run.report.speeds and not results.speeds) or (run.report.scores and not results.scores))
        if cached is not None and (generation := run.report.generation) is not None:
            lost = lost or bool(generation.speeds or generation.is_scored)  # which a build does not measure
        _note_build(run, log, lost=lost)
        log.add_notes(_kept_files_notes(run))
        report = _report(run, variants, results, log.notes, cached, chooses=chose)
        if lost:
            for name in (reports.JSON_NAME, reports.HTML_NAME):
                shutil.copyfile(out / name, out / f"run-{name}")
        replace_engine(scratch / "compressed", out, engine.target, report)
    return report


@contextlib.contextmanager
def whole_engines(out: Path, workload: Workload, threads: int | None, listener: Listener) -> Iterator[Path | None]:
    """Inside, the engines with caches of the model that a run compressed, to time them beside those of the run.

    Args:
        out: folder of a run on a model that generates.
        workload: the requests that are timed.
        threads: threads of the engines; None: one per core.
        listener: receives the progress.

    Yields:
        The folder of the engines, in fp32, which is removed afterwards; None: the model of the run cannot be loaded
        here, for which there is a note with the reason.

    Raises:
        CompressorError: the graphs compute something else than the model, or an engine cannot be built.
    """
    log = RunLog(listener)
    try:
        recipe, folder = _whole_model(out, log)
    except (CompressorError, GraphPassError) as error:
        text = (
            f"only the engines of the run are timed, since the model that it compressed cannot be loaded here ({error})"
        )
        log.add_notes([Note(code=NoteCode.NO_DENSE_GRAPH, text=text)])
        yield None
        return
    from compressor.generation.deliver import dense_engines, export_whole

    runtime, export = cached_target(out), recipe.export
    limit, feeds = token_limit(folder.model), example_feeds(folder, 2, 8)
    cases = make_cases(partial(example_feeds, folder), maximum_length=limit, shapes=((2, 8),))
    plan = keep_all(folder.access.groups(feeds, export.attention, "kv"))
    with tempfile.TemporaryDirectory() as scratch:
        with log.stage(EXPORT_STAGE):
            whole = export_whole(folder, plan, cases, Path(scratch), opset=export.opset, attention=export.attention)
        with log.stage("dense: building the engines with caches"):
            dense = dense_engines(whole, runtime, workload, threads)
        yield dense.path.parent


def _whole_model(out: Path, log: RunLog) -> tuple[Recipe, ModelFolder]:
    """The recipe of the run of a folder, as far as it says how its model is read and exported, and that model.

    Raises:
        CompressorError, GraphPassError: the folder has no report, or the model cannot be loaded here.
    """
    fields = reports.load(out).recipe
    # What a report allows to run, and a task that is code, is not loaded by those who time its engines.
    names = [name for name in (*SourceConfig.model_fields, *ExportConfig.model_fields) if name in fields]
    kept = {name: fields[name] for name in names if not extra_of(FIELDS[name], "runs_code")}
    if is_own_task(kept.get("task")):
        del kept["task"]
    recipe = Recipe(**kept)
    if recipe.graph is None:
        require_pytorch()
    from compressor.run.load import load_folder

    with log.stage("dense: loading the model"):
        return recipe, load_folder(recipe, recipe.source.model)


_Cached = tuple[Generation, tuple[Proof, ...]]
"""What the report says of engines with caches that a build has made, and their proofs."""


def _build_cached(run: FinishedRun, scratch: Path, log: RunLog) -> _Cached | None:
    """Build the engines with caches again; None: the run has no graphs of them, or the target no engines."""
    generation, engine, out = run.report.generation, run.recipe.engine, run.graphs["compressed"].parent
    runtime = target(engine.target)
    if generation is None or runtime.caches is None or not (out / DECODER).is_file():
        return None
    from compressor.generation.rebuild import build_again, rounding_of

    rounding, folder = rounding_of(generation), scratch / "cached"
    timed = [(row.speed.batch, row.speed.seq or 1) for row in generation.speeds]
    sizes = timed or [(batch, seq or 1) for batch, seq in itertools.product(run.recipe.measure.batch, run.lengths)]
    folder.mkdir()
    with log.stage("compressed: building the engines with caches"):
        proofs = build_again(out, folder, runtime, rounding, run.cases, sizes, engine.threads)
        if has_pytorch():
            _write_library_files(out, folder, runtime, log)
    for file in folder.iterdir():
        if not file.name.startswith((ENCODER, DECODER)):  # copies of the graphs
            file.replace(scratch / "compressed" / file.name)
    measured: dict[str, Any] = dict.fromkeys(("speed", "metric", "difference", "agreement")) | {"milliseconds": {}}
    changes = {
        "precision": generation.precision if rounding.precision is None else rounding.label,
        "speeds": (),
        "is_scored": False,
        "candidates": tuple(row.model_copy(update=measured) for row in generation.candidates),
    }
    return generation.model_copy(update=changes), proofs


def _write_library_files(out: Path, folder: Path, runtime: Target, log: RunLog) -> None:
    """Write what the runtime's own library reads beside engines with caches; `out` has the tokenizer."""
    if not (out / "config.json").is_file():  # the graph was a file without one
        return
    from compressor.generation.runner import runner_of

    runner = runner_of(out, lambda: runtime.open_sessions(folder, provider="cpu"))
    tokenizer = getattr(runner.processor, "tokenizer", runner.processor)
    settings = runner.model.config.to_dict(), runner.model.generation_config.to_dict()
    reason = runtime.write_library_files(folder, GeneratingModel(*settings, runner.limit, tokenizer))
    if reason is not None:
        log.add_notes([Note(code=NoteCode.LIBRARY_LIMITED, text=f"{runtime.library} and this folder: {reason}")])


def _read_rows(run: FinishedRun, scratch: Path, log: RunLog) -> Data | None:
    """The rows of the run; None where they, its model folder, the dense graph or PyTorch are not on this machine.

    A custom task is code, and the folder may come from elsewhere: it is not loaded because a report names it.
    """
    recipe = run.report.recipe
    if "dense" not in run.graphs or not any(map(recipe.get, ROW_SOURCES)):
        return None
    if is_own_task(task := recipe.get("task")):
        reason = f"the task of the run, {task}, is code that is not loaded from a report"
    else:
        try:
            if graph_of(Path(recipe["model"])) is None:
                require_pytorch()
            from compressor.run.load import read_rows_again

            with log.stage("reading the rows"):
                data = read_rows_again(run.report, scratch)
            if data is not None:
                return data
            reason = f"{recipe.get('data') or recipe.get('test_data')}: not the rows of the run"
        except CompressorError as error:
            reason = f"the rows or the model of the run cannot be used here ({error})"
    scores = headline_scores(run.report.scores)
    earlier = ", ".join(f"{row.metric} {row.dense:.4g} to {row.compressed:.4g}" for row in scores)
    runtime = run.report.session.get("runtime", "another runtime")
    text = f"{reason}, so the metric of this engine was not measured"
    text += f" ({runtime} measured {earlier})" if earlier else ""
    log.add_notes([Note(code=NoteCode.ROWS_MISSING, text=text)])
    return None


def _build(name: VariantName, run: FinishedRun, stages: Stages, products: MatmulTimes | None) -> Variant:
    """Build and prove an engine: from the first graph of the run from which that is possible.

    By the times of single products (`products`), an int8 engine computes some in floats; without them all in int8.
    """
    graph, is_dense = run.graphs[name], name == "dense"
    config = run.recipe.engine.reference if is_dense else run.recipe.engine
    shrunk, folder = ShrunkGraph(name, run.report.plan, graph, ()), stages.scratch / name
    failures: dict[str, CompressorError] = {}
    for file in [None] if is_dense else _engine_sources(run):
        source = None if file is None else graph.with_name(file)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            options = None if is_dense or products is None else _mixed(products, config, source, graph, stages)
            variant = stages.build(shrunk, config, quantized=source, folder=folder, options=options)
        except CompressorError as error:
            failures[file or graph.name] = error
            continue
        if failures:
            reasons = "; ".join(f"{failed} ({error})" for failed, error in failures.items())
            text = f"the engine was built from {file or graph.name}, since none could be built from {reasons}"
            stages.log.add_notes([Note(code=NoteCode.ENGINE_CHOSEN, text=text)])
        return variant
    raise next(iter(failures.values()))


def _mixed(
    products: MatmulTimes, config: EngineConfig, source: Path | None, graph: Path, stages: Stages
) -> BuildOptions | None:
    """The options of an int8 engine whose products are in floats where that is faster on this machine."""
    if config.precision != "int8" or "float_widths" not in target(config.target).options:
        return None
    choice = Choice(config, DYNAMIC if source is None else PORTABLE, mixes=True)
    mixed, options = products.mixed(choice, source or graph, stages.options)
    if mixed.precision == config.precision:
        return options
    text = (
        f"each matmul of this engine alone is faster in {mixed.precision} than in int8 on this machine; time an engine"
        f" in {mixed.precision} too (--precision {mixed.precision})"
    )
    stages.log.add_notes([Note(code=NoteCode.ENGINE_CHOSEN, text=text)])
    return None


def _note_what_to_expect(run: FinishedRun, log: RunLog) -> None:
    """Note before the build what it cannot measure, and that the proof of the engine may fail."""
    if "dense" not in run.graphs:
        text = (
            "the folder of the run has no dense.onnx: the engine is built, proven and timed alone, and neither its gain"
            " nor its metric is measured, because there is nothing to compare with; a run with --save-dense writes that"
            " graph"
        )
        log.add_notes([Note(code=NoteCode.NO_DENSE_GRAPH, text=text)])
    if draws_ids(load(run.graphs["compressed"])):
        text = (
            "the graph carries no example rows: the engine is proven and timed on random ids; compress the model again"
            " for ids that its tokenizer can make"
        )
        log.add_notes([Note(code=NoteCode.RANDOM_INPUTS, text=text)])
    name = run.recipe.engine.target
    dropped = any(note.code is NoteCode.POSITIONS_DROPPED for note in run.report.notes)
    if dropped and not target(name).drops_positions:
        text = (
            f"the graph computes only the positions that its outputs depend on, and the installed version of {name}"
            " computes some such graphs wrongly for padded rows; if the proof of the engine fails, compress the model"
            " again with --keep-unread-positions"
        )
        log.add_notes([Note(code=NoteCode.POSITIONS_UNCERTAIN, text=text)])


def _note_build(run: FinishedRun, log: RunLog, *, lost: bool) -> None:
    engine = run.recipe.engine
    kernel = run.report.recipe.get("kernel")
    if kernel and engine.kernel is None and "kernel" in target(engine.target).options:
        text = f"the kernel of the run, {kernel}, is not used; name it if you trust it (--kernel)"
        log.add_notes([Note(code=NoteCode.KERNEL_UNUSED, text=text)])
    if lost:
        text = "results of the run that this build could not measure are kept in run-report.html and run-report.json"
        log.add_notes([Note(code=NoteCode.EARLIER_REPORT_KEPT, text=text)])
    log.add_notes(run_notes.mask_notes(run.report.plan, run.lengths))


def _kept_files_notes(run: FinishedRun) -> list[Note]:
    """Notes on the files of earlier engines that stay beside the new one, and on what reads them."""
    out, new = run.graphs["compressed"].parent, target(run.recipe.engine.target)
    texts = [
        f"{', '.join(path.name for path in files)}: from an earlier build for {runtime.title}, and still usable; the"
        f" report, and the commands that read it, use {new.engine_file}"
        for runtime in map(target, TARGETS)
        if runtime is not new and (files := runtime.engine_files(out))
    ]
    sources = _engine_sources(run)
    texts += [
        f"{name}: a quantized graph for builds in 8 bits; {new.engine_file} is not built from it"
        for name in QUANTIZED_GRAPHS
        if name not in sources and (out / name).is_file()
    ]
    return [Note(code=NoteCode.FILES_KEPT, text=text) for text in texts]


def _report(
    run: FinishedRun,
    variants: Mapping[VariantName, Variant],
    results: Results,
    notes: Sequence[Note],
    cached: _Cached | None,
    *,
    chooses: bool,
) -> Report:
    """The report of the run, updated with what this build measured; `chooses`: the next build chooses the precision."""
    before, recipe, allowed = run.report, run.recipe, run.report.recipe.get("max_drop")
    status = DropStatus.FAILED if before.drop_status is DropStatus.FAILED else DropStatus.NOT_CHECKED
    # A metric that failed on another engine has not passed on this one; that of engines with caches is not measured.
    is_of_caches = before.generation is not None and (
        before.generation.is_scored or before.generation.precision in WEIGHT_BITS
    )
    if results.scores and not is_of_caches:
        status = drop_status(allowed, results.scores)
    # Proofs of graphs hold whatever engine is built from them.
    lasting = _OF_GRAPHS if cached is not None else (*_OF_GRAPHS, *_OF_CACHED_ENGINES)
    proofs = [proof for proof in before.proofs if proof.stage in lasting] if before.graphs else []
    generation, cached_proofs = cached or (before.generation, ())
    proofs += cached_proofs
    dense = before.dense.model_copy(update=_WITHOUT_ENGINE)
    measured = replace(results, facts={"dense": dense, **results.facts}).fields(
        variants["compressed"],
        allowed,
        plan=before.plan,
        proofs=(*proofs, *(proof for variant in variants.values() for proof in variant.proofs)),
        drop_status=status,
        refused=before.refused,
        blocks=before.blocks,
        missing=None,
        # Times of the run are of its own engine; what was counted holds for every engine.
        budget=tuple(row for row in before.budget if not _is_of_engine(row, cached)),
    )
    fields = {name: value for name, value in recipe.flat().items() if name in BUILD_FIELDS}
    if None not in run.lengths:  # recorded even if nothing was timed: the next build of the folder uses them
        fields["seq"] = list(run.lengths)
    if chooses:
        fields["precision"] = AUTO
    if before.recipe.get("precision") in WEIGHT_BITS:  # of the engine with caches, which a build keeps
        fields["precision"] = before.recipe["precision"]
    changes = {
        **measured,
        "notes": tuple(dict.fromkeys((*_lasting_notes(run, results, cached), *notes))),
        "candidates": (),
        "costs": tuple(row for row in before.costs if not _is_of_engine(row, cached)),
        "generation": generation,
        "target": recipe.engine.target,
        "precision": recipe.engine.precision,
        "recipe": {**before.recipe, **fields},
    }
    return before.model_copy(update=changes)


def replace_engine(built: Path, out: Path, name: str, report: Report) -> None:
    """Move a new engine of a target, by its name, with its files from `built` and its report into the folder of a run.

    The file without which the engine cannot be loaded (the metadata of a TensorRT engine, else the engine itself) is
    removed first and moved last, after the report. An interruption therefore leaves no engine beside the report of
    another one. Files of the former engine of this target that the new one lacks, such as those of its weights, are
    removed; engines of other targets stay. New engines with caches replace those of every target, since a folder
    generates with one.
    """
    runtime = target(name)
    metadata = runtime.metadata_file
    last = metadata if metadata is not None and (built / metadata).is_file() else runtime.engine_file
    files = sorted(built.iterdir())  # before anything is removed: a run may have replaced the folder
    (out / last).unlink(missing_ok=True)
    former = runtime.engine_files(out)
    if runtime.session_files(built):
        former += [
            file for each in map(target, TARGETS) for file in (*each.session_files(out), *each.library_files(out))
        ]
    for path in former:
        if not (built / path.name).is_file():
            path.unlink()
    for path in files:
        if path.name != last:
            path.replace(out / path.name)
    reports.write(report, out)
    (built / last).replace(out / last)
    link_library_files(out)
