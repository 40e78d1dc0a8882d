"""The engine of a finished run for another target, or on another machine: built, proven and measured from its folder.

The folder needs nothing but what the run wrote. Where the model folder and the rows of the run are on this machine too,
the metric is measured on the engines.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import torch

from compressor import model_folder
from compressor import report as reports
from compressor.config.fields import extra_of, flag_of, usage_error
from compressor.config.run import BUILD_FIELDS, FIELDS, Recipe, current_fields
from compressor.environment import machine
from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.measure import require_run
from compressor.progress import Listener
from compressor.results import (
    DropStatus,
    EngineFacts,
    Note,
    NoteCode,
    ProofStage,
    Report,
    Score,
    Speed,
    VariantName,
)
from compressor.run import run_notes, verify
from compressor.run.build_options import build_options
from compressor.run.evaluate import score, statistics_of
from compressor.run.measure import engine_facts, time_variants, timing_stage
from compressor.run.products import Case, ShrunkGraph, Variant
from compressor.run.run_log import RunLog
from compressor.run.variant import build_engine
from compressor.run.write_report import drop_status
from compressor.targets import BuildOptions, target
from compressor.targets.graph_facts import graph_digest
from compressor.targets.random_inputs import fixed_batch, random_feeds
from compressor.tasks import Data, open_data
from compressor.workdir import locked
from graph_passes import load
from graph_passes.block_sparse.masks import REACH

_WITHOUT_ENGINE: Mapping[str, Any] = {
    "file": None,
    "peak_memory_bytes": None,
    "attentions": 0,
    "fused": 0,
    "optimization": "not built",
    "built": None,
}
"""Facts of an engine, rather than of its graph, where none was built."""


@dataclass(frozen=True)
class FinishedRun:
    """The folder of a finished run, as far as it decides how its engine is built.

    Attributes:
        report: what the run reported.
        recipe: fields of its recipe that concern the build, and those that were requested anew.
        graphs: the proven graph of each variant; the dense one only where the folder has it.
        lengths: lengths to time, in tokens.
        cases: inputs of the proofs.
    """

    report: Report
    recipe: Recipe
    graphs: Mapping[VariantName, Path]
    lengths: tuple[int | None, ...]
    cases: tuple[Case, ...]


def rebuild(out: Path, fields: Mapping[str, Any], listener: Listener) -> Report:
    """Build the engine of a run's folder, and write it with a new report once every proof holds.

    Args:
        out: the folder.
        fields: fields of the recipe, among `BUILD_FIELDS`, that replace those of the run.
        listener: is called with stages, progress and notes.

    Raises:
        UsageError: a field is out of its range.
        InputError: no run wrote the folder, its graph is not the proven one, or a size to time exceeds what the model
            takes. The folder stays as it was.
        TargetMissingError: the runtime or its device is missing. The folder stays as it was.
        MismatchError: the engine computes something else than the graph. The folder stays as it was.
    """
    run = load_run(out, fields)
    engine = run.recipe.engine
    runtime = target(engine.target)
    runtime.check(precision=engine.precision, provider=engine.provider, kernel=engine.kernel)
    log = RunLog(listener)
    with locked(out), tempfile.TemporaryDirectory(prefix=".build-", dir=out) as scratch:
        data = _read_rows(run, Path(scratch), log)
        options = build_options(run.recipe, run.lengths, [case.feeds for case in run.cases], data)
        variants = {name: _build(name, run, options, Path(scratch), log) for name in run.graphs}
        scores = _evaluate(variants, data, run, log)
        speeds = _time(variants, run, log)
        lost = bool((run.report.speeds and not speeds) or (run.report.scores and not scores))
        _note_build(run, variants, log, lost=lost)
        report = _report(run, variants, scores, speeds, log)
        if lost:
            for name in (reports.JSON_NAME, reports.HTML_NAME):
                shutil.copyfile(out / name, out / f"run-{name}")
        replace_engine(Path(scratch) / "compressed", out, engine.target, report)
    return report


def load_run(out: Path, fields: Mapping[str, Any]) -> FinishedRun:
    """Read the folder of a run, and check that its graphs are the proven ones.

    Raises:
        UsageError: a field is out of its range.
        InputError: a file is missing or is another one than the run wrote.
    """
    report = reports.load(out)
    recipe = _recipe(report, fields)
    graphs: dict[VariantName, Path] = {}
    names: tuple[VariantName, ...] = ("compressed", "dense")
    for name, path in zip(names, (out / "model.onnx", out / "dense.onnx"), strict=True):
        if path.is_file():
            graphs[name] = path
        elif name == "compressed" or path.name in report.graphs:
            raise InputError(
                f"{path}: missing; copy the whole folder of the run", code=ErrorCode.FILE_MISSING, path=path
            )
        if path.is_file() and report.graphs.get(path.name) not in (None, graph_digest(path)):
            raise InputError(
                f"{path}: not the graph that the run proved; copy the whole folder of the run again",
                code=ErrorCode.FILE_MISMATCH,
                path=path,
            )
    timed: tuple[int | None, ...] = tuple(dict.fromkeys(row.seq for row in report.speeds))
    lengths = recipe.measure.seq or timed or (128,)
    cases = _cases(graphs["compressed"], max(seq or 1 for seq in lengths))
    ordered = {name: graphs[name] for name in ("dense", "compressed") if name in graphs}
    return FinishedRun(report, recipe, ordered, lengths, cases)


def _recipe(report: Report, fields: Mapping[str, Any]) -> Recipe:
    """The fields of a run's recipe that concern the build, replaced by those of `fields`."""
    stored = current_fields(report.recipe)
    # The folder may come from elsewhere: a library that it names is code, and comes from the command line alone.
    kept = {
        name: value
        for name, value in stored.items()
        if name in BUILD_FIELDS and value is not None and not extra_of(FIELDS[name], "runs_code")
    }
    if "target" in fields and fields["target"] != kept.get("target"):
        kept = {name: kept[name] for name in kept if name in ("batch", "seq", "seconds")}
    try:
        return Recipe(**{**kept, **fields, "model": Path(os.devnull), "seed": stored.get("seed", 0)})
    except pydantic.ValidationError as error:
        raise usage_error(error, FIELDS, flag_of) from error


def _cases(graph: Path, maximum: int) -> tuple[Case, ...]:
    """Inputs to prove an engine on: no longer than what is timed or what the masks cover."""
    model = load(graph)
    batch_size = fixed_batch(model)

    def draw(batch: int, seq: int, seed: int) -> dict[str, torch.Tensor]:
        feeds = random_feeds(model, batch_size or batch, seq, seed=seed, padded=batch > 1)
        return {name: torch.from_numpy(array) for name, array in feeds.items()}

    reach = json.loads(model.metadata_props.get(REACH, "{}"))
    return verify.make_cases(draw, maximum_length=maximum, mask_reach=min(reach.values(), default=None))


def _read_rows(run: FinishedRun, scratch: Path, log: RunLog) -> Data | None:
    """The rows of the run; None where they or its model folder are not on this machine, or there is no dense graph."""
    if not run.report.scores or "dense" not in run.graphs:
        return None
    try:
        recipe = Recipe(**{**current_fields(run.report.recipe), "out": scratch})
        with log.stage("reading the rows"):
            folder = model_folder.load(recipe.source.model, task=recipe.source.task, needs_processor=True)
            return open_data(recipe.rows, folder, recipe.selection.seed)
    except (CompressorError, pydantic.ValidationError):
        earlier = ", ".join(f"{row.metric} {row.dense:.4g} to {row.compressed:.4g}" for row in run.report.scores)
        runtime = run.report.session.get("runtime", "another runtime")
        text = (
            "the rows or the model folder of the run are not on this machine, so the metric of this engine was not"
            f" measured ({runtime} measured {earlier})"
        )
        log.add_notes([Note(code=NoteCode.ROWS_MISSING, text=text)])
        return None


def _build(name: VariantName, run: FinishedRun, options: BuildOptions, scratch: Path, log: RunLog) -> Variant:
    folder, graph = scratch / name, run.graphs[name]
    folder.mkdir()
    with log.stage(f"{name}: building the engine"):
        engine = build_engine(graph, folder, run.recipe.engine, options)
        proof = verify.require(verify.prove_engine(graph, engine, run.cases, name))
    return Variant(ShrunkGraph(name, run.report.plan, graph, ()), engine, (proof,))


def _evaluate(
    variants: Mapping[VariantName, Variant], data: Data | None, run: FinishedRun, log: RunLog
) -> tuple[Score, ...]:
    if data is None:
        return ()
    selection, statistics = run.recipe.selection, {}
    for name, variant in variants.items():
        with log.stage(f"{name}: scoring on the test rows") as on_progress:
            statistics[name] = statistics_of(variant, data, selection.batch_size, on_progress)
    return (score(statistics["dense"], statistics["compressed"], data, selection.seed),)


def _time(variants: Mapping[VariantName, Variant], run: FinishedRun, log: RunLog) -> tuple[Speed, ...]:
    """Times at every batch size and length; none without a dense engine to compare with."""
    model = load(run.graphs["compressed"])
    sizes = itertools.product(run.recipe.measure.batch, run.lengths)
    inputs = {(batch, seq): random_feeds(model, batch, seq or 1) for batch, seq in sizes}
    for variant in variants.values():
        for (batch, seq), feeds in inputs.items():
            require_run(variant.engine, variant.graph.path, feeds, batch, seq or 1)
    if "dense" not in variants:
        return ()
    speeds = []
    for (batch, seq), feeds in inputs.items():
        with log.stage(timing_stage(batch, seq)) as on_progress:
            speeds.append(
                time_variants(
                    variants["dense"],
                    variants["compressed"],
                    feeds,
                    run.recipe,
                    batch=batch,
                    seq=seq,
                    on_progress=on_progress,
                )
            )
    return tuple(speeds)


def _note_build(run: FinishedRun, variants: Mapping[VariantName, Variant], log: RunLog, *, lost: bool) -> None:
    engine = run.recipe.engine
    kernel = run.report.recipe.get("kernel")
    if kernel and engine.kernel is None and "kernel" in target(engine.target).options:
        text = f"the kernel of the run, {kernel}, is not used; name it if you trust it (--kernel)"
        log.add_notes([Note(code=NoteCode.KERNEL_UNUSED, text=text)])
    if "dense" not in variants:
        text = (
            "the folder of the run has no dense.onnx: the engine was proven but not compared with a dense one, of which"
            " the report has only the facts of its graph"
        )
        log.add_notes([Note(code=NoteCode.NO_DENSE_GRAPH, text=text)])
    if lost:
        text = "results of the run that this build could not measure are kept in run-report.html and run-report.json"
        log.add_notes([Note(code=NoteCode.EARLIER_REPORT_KEPT, text=text)])
    log.add_notes(run_notes.of_masks(run.report.plan, run.lengths))


def _report(
    run: FinishedRun,
    variants: Mapping[VariantName, Variant],
    scores: tuple[Score, ...],
    speeds: tuple[Speed, ...],
    log: RunLog,
) -> Report:
    """The report of the run with everything that this build measured."""
    before, recipe = run.report, run.recipe
    with log.stage("measuring memory"):
        sizes = {"batch": recipe.measure.batch[0], "seq": run.lengths[0] or 1}
        facts: dict[VariantName, EngineFacts] = dict(engine_facts(tuple(variants.values()), **sizes))
    log.add_notes(run_notes.of_unmeasured_memory(facts))
    earlier = [proof for proof in before.proofs if proof.stage is not ProofStage.BUILD] if before.graphs else []
    max_drop = before.recipe.get("max_drop")
    status = drop_status(max_drop, scores)
    if not scores:  # a metric that failed on another engine has not passed on this one
        failed = before.drop_status is DropStatus.FAILED
        status = DropStatus.FAILED if failed else DropStatus.NOT_CHECKED
    results: dict[str, Any] = {
        "plan": before.plan,
        "dense": facts.get("dense", before.dense.model_copy(update=_WITHOUT_ENGINE)),
        "compressed": facts["compressed"],
        "speeds": speeds,
        "scores": scores,
        "proofs": (*earlier, *(proof for variant in variants.values() for proof in variant.proofs)),
        "drop_status": status,
        "refused": before.refused,
        "blocks": before.blocks,
    }
    # The lengths are recorded even if nothing was timed: the next build of the folder uses them.
    lengths = {"seq": list(run.lengths)} if None not in run.lengths else {}
    fields = {name: value for name, value in recipe.flat().items() if name in BUILD_FIELDS}
    notes = [note for note in before.notes if note.code is not NoteCode.TARGET_MISSING]
    changes = {
        **results,
        "verdict": reports.verdict(**results, max_drop=max_drop),
        "notes": tuple(dict.fromkeys((*notes, *log.notes))),
        "missing": None,
        "target": recipe.engine.target,
        "precision": recipe.engine.precision,
        "session": dict(variants["compressed"].engine.session),
        "machine": machine(),
        "recipe": {**current_fields(before.recipe), **fields, **lengths},
    }
    return before.model_copy(update=changes)


def replace_engine(built: Path, out: Path, name: str, report: Report) -> None:
    """Move what was built into the folder of a run, with its report.

    The file without which nothing loads the engine is removed first and moved last, after the report: the metadata of a
    TensorRT engine, else the engine itself. So an interruption leaves no engine beside the report of another one.
    Engines of other targets stay.
    """
    runtime = target(name)
    metadata = runtime.metadata_file
    last = metadata if metadata is not None and (built / metadata).is_file() else runtime.engine_file
    (out / last).unlink(missing_ok=True)
    for path in sorted(built.iterdir()):
        if path.name != last:
            path.replace(out / path.name)
    reports.write(report, out)
    (built / last).replace(out / last)
