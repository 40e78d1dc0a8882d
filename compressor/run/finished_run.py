"""The folder of a finished run, read and checked before its engine is built again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor import report as reports
from compressor.config.fields import extra_of
from compressor.config.run import BUILD_FIELDS, FIELDS, Recipe, definite_fields
from compressor.config.sections import EngineConfig
from compressor.engines.choices import PORTABLE, SYMMETRIC
from compressor.engines.prove import Case, Inputs, make_cases, proven_shapes
from compressor.errors import ErrorCode, InputError
from compressor.results import Note, NoteCode, Report, VariantName
from compressor.run.report_fields import EvaluationResult
from compressor.run.row_cases import row_cases
from compressor.targets import QUANTIZED, target
from compressor.targets.graph_facts import graph_digest
from compressor.targets.trial_inputs import fixed_batch, trial_feeds
from graph_passes import load
from graph_passes.block_sparse.masks import REACH

if TYPE_CHECKING:
    from compressor.tasks import Data

_OF_THE_ENGINE = (
    NoteCode.TARGET_MISSING,
    NoteCode.ROWS_MISSING,
    NoteCode.NO_DENSE_GRAPH,
    NoteCode.TIMED_ALONE,
    NoteCode.FILES_KEPT,
    NoteCode.SPEED_UNCERTAIN,
    NoteCode.ANSWERS_UNCHANGED,
    NoteCode.MEMORY_UNMEASURED,
    NoteCode.TIMES_DRIFTED,
    NoteCode.ENGINE_CHOSEN,
    NoteCode.ENGINES_COMPARED_WHOLE,
    NoteCode.LOSS_UNBOUNDED,
    NoteCode.POSITIONS_UNCERTAIN,
    NoteCode.KERNEL_UNUSED,
    NoteCode.QUANTIZED_FOR_TARGET,
    NoteCode.MASKS_LONGER,
    NoteCode.RANDOM_INPUTS,
)
"""Codes of notes on an engine and its measurements, which those of another engine replace."""
_OF_QUANTIZED_GRAPHS = (
    NoteCode.PRODUCTS_IN_FLOAT,
    NoteCode.OUTLIER_RANGES,
    NoteCode.FEW_CALIBRATION_ROWS,
    NoteCode.NO_INT8_INSTRUCTIONS,
)
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

    def with_rows(self, data: Data) -> FinishedRun:
        """The run with proof cases from its rows."""
        rows = row_cases(data, self.inputs, longest=self.mask_reach)
        return replace(self, cases=(*self.cases, *rows))


def load_run(out: Path, fields: Mapping[str, Any]) -> FinishedRun:
    """Read the folder of a run, and check that its graphs are the proven ones.

    Args:
        out: the folder.
        fields: fields of the recipe, among `BUILD_FIELDS`, that replace those of the run.

    Raises:
        UsageError: a field is out of its range.
        InputError: a file is missing, or is not the one that the run wrote.
    """
    report = reports.load(out)
    recipe = _recipe(report, fields)
    recipe.engine.require_definite()
    graphs: dict[VariantName, Path] = {}
    names: tuple[VariantName, ...] = ("compressed", "dense")
    for name, path in zip(names, (out / "model.onnx", out / "dense.onnx"), strict=True):
        if path.is_file():
            graphs[name] = path
        elif name == "compressed" or path.name in report.graphs:
            raise InputError(
                f"{path}: missing; copy the whole folder of the run", code=ErrorCode.FILE_MISSING, path=path
            )
        if path.is_file():
            _require_proven(path, report)
    if (file := quantized_source(report, recipe.engine)) is not None:
        _check_quantized(out / file, report, recipe)
    for file in target(recipe.engine.target).sources(recipe.engine.definite_precision):
        if file is not None and (out / file).is_file():
            _require_proven(out / file, report)
    timed: tuple[int | None, ...] = tuple(dict.fromkeys(row.seq for row in report.speeds))
    lengths = recipe.measure.seq or timed or (128,)
    shapes = recipe.engine.parsed_shapes
    longest = max(seq or 1 for seq in (*lengths, *(seq for _, seq in shapes)))
    inputs, reach = _inputs(graphs["compressed"])
    proven = (*shapes, *proven_shapes(recipe.measure.batch, lengths))
    cases = make_cases(inputs, maximum_length=longest, mask_reach=reach, shapes=proven)
    ordered: dict[VariantName, Path] = {name: graphs[name] for name in reversed(names) if name in graphs}
    return FinishedRun(report, recipe, ordered, lengths, cases, inputs, reach)


def quantized_source(report: Report, engine: EngineConfig) -> str | None:
    """The name of the quantized graph of a run that an engine is built from; None: a graph in floats.

    The engine that the run delivered is built in its form, also by a target that could quantize the float graph itself.

    Args:
        report: the report of the run.
        engine: target and precision.
    """
    runtime, precision = target(engine.target), engine.definite_precision
    delivered = {f"{engine.target} {precision} {form}" for form in (PORTABLE, SYMMETRIC)}
    form, _, _ = (report.delivered or "").partition(",")  # products that returned to floats follow
    needs_graph = form in delivered or runtime.sources(precision)[0] is not None
    return runtime.quantized_graph(precision) if needs_graph else None


def engine_sources(run: FinishedRun) -> list[str | None]:
    """Names of the graphs that the engine of a run can be built from, in the order to try them; None: floats."""
    engine, folder = run.recipe.engine, run.graphs["compressed"].parent
    sources = target(engine.target).sources(engine.definite_precision)
    usable = [file for file in sources if file is None or (folder / file).is_file()]
    return list(dict.fromkeys((quantized_source(run.report, engine), *usable)))


def _check_quantized(path: Path, report: Report, recipe: Recipe) -> None:
    """Raise InputError unless the quantized graph is there, and is the proven one."""
    if not path.is_file():
        engine = recipe.engine
        raise InputError(
            f"{path}: missing, and {engine.target} runs in {engine.precision} only a graph that is quantized; run"
            f" compress --target {engine.target} --precision {engine.precision} with rows first",
            code=ErrorCode.FILE_MISSING,
            path=path,
        )
    _require_proven(path, report)


def _require_proven(path: Path, report: Report) -> None:
    """Raise InputError unless a graph is the one that the run proved."""
    if report.graphs.get(path.name) not in (None, graph_digest(path)):
        raise InputError(
            f"{path}: not the graph that the run proved; copy the whole folder of the run again",
            code=ErrorCode.FILE_MISMATCH,
            path=path,
        )


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
    return Recipe(**{**kept, **fields, "model": Path(os.devnull), **settings})


def _inputs(graph: Path) -> tuple[Inputs, int | None]:
    """What makes up inputs of a graph, also of one with fixed shapes, and the positions that its masks cover."""
    model = load(graph)
    batch_size = fixed_batch(model)

    def draw(batch: int, seq: int, seed: int) -> dict[str, np.ndarray]:
        return trial_feeds(model, batch_size or batch, seq, seed=seed, padded=batch > 1)

    return draw, min(json.loads(model.metadata_props.get(REACH, "{}")).values(), default=None)


def lasting_notes(run: FinishedRun, evaluated: EvaluationResult) -> list[Note]:
    """The notes of a run that a build of its engine does not replace.

    Args:
        run: the run, with the recipe of the build.
        evaluated: what the build scored.
    """
    before, outdated = run.report, set(_OF_THE_ENGINE)
    if run.recipe.engine.precision not in QUANTIZED:
        outdated.update(_OF_QUANTIZED_GRAPHS)
    if evaluated.embeddings is not None:
        outdated.add(NoteCode.EMBEDDINGS_CHANGED)
    if any(row.unit == "ms" for row in before.budget):
        outdated |= {NoteCode.BUDGET_MET, NoteCode.BUDGET_MISSED}
    return [note for note in before.notes if note.code not in outdated]
