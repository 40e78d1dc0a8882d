"""Run a study: open the folder, run the missing cells, write the findings."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies.ablate import Ablate
from benchmarks.studies.astar import AStar
from benchmarks.studies.base import Study
from benchmarks.studies.blocks import Blocks
from benchmarks.studies.cell_store import Cell, CellStore, Result
from benchmarks.studies.context import StudyContext
from benchmarks.studies.dynamics import Dynamics
from benchmarks.studies.findings import Findings
from benchmarks.studies.grid import Grid
from benchmarks.studies.importance import Importance
from benchmarks.studies.penalty import Penalty
from benchmarks.studies.request import RESERVED, StudyRequest, StudySize
from benchmarks.studies.speed import SpeedStudy
from compressor.config.fields import extra_of, flag_of
from compressor.config.run import FIELDS
from compressor.environment import machine
from compressor.errors import ErrorCode, InputError, UsageError, suggestion
from compressor.progress import Listener, NullListener, ProgressCallback
from compressor.results import Note
from compressor.selection.ray_search.cluster import check_reachable
from compressor.selection.ray_search.evaluator import evaluator_factory
from compressor.tasks.data import rows_hash
from compressor.tasks.row_files import is_file_name

KINDS: dict[str, type[Study]] = {
    "grid": Grid,
    "astar": AStar,
    "ablate": Ablate,
    "dynamics": Dynamics,
    "penalty": Penalty,
    "importance": Importance,
    "speed": SpeedStudy,
    "blocks": Blocks,
}
"""Kind of study by name. To add one: write the file, add one line here."""
_IGNORED_FIELDS = (*RESERVED, "seed")
"""Fields of a recipe that a study sets itself, that change no result, or that every study depends on."""
_SHOWN_ELSEWHERE = (
    *("kind", "size", "model", "rows", "seed", "sources"),
    *("training_steps", "batch_size", "learning_rate", "options"),
)
"""Keys of a study's recipe that the page shows in its head or in another fact."""


def check(kind: str, request: StudyRequest) -> type[Study]:
    """The class of a kind of study, after the request is checked; nothing is loaded.

    Raises:
        UsageError: an unknown kind, an axis or a second data set that the study does not vary, an unknown value, or
            Ray workers that the study does not use.
        InputError: a file of rows, or another file that the study reads, is missing.
        TargetMissingError: the Ray cluster is not reachable.
    """
    if kind not in KINDS:
        raise UsageError(
            f"study {kind!r}: unknown; {suggestion(kind, list(KINDS))}",
            code=ErrorCode.UNKNOWN_NAME,
            field="kind",
            value=kind,
        )
    study_class = KINDS[kind]
    for name in request.axes:
        if name not in study_class.axes:
            known = ", ".join(map(flag_of, study_class.axes)) or "nothing"
            raise UsageError(
                f"{flag_of(name)}: study {kind} does not vary it; it varies {known}",
                code=ErrorCode.CONTRADICTION,
                field=name,
            )
    if len(request.sources) > 1 and not study_class.compares_data_sets:
        raise UsageError(
            f"--data: study {kind} uses one data set, but {len(request.sources)} are set; set one",
            code=ErrorCode.CONTRADICTION,
            field="data",
        )
    if study_class.needs_rows and not request.recipe.rows.data:
        raise UsageError(f"study {kind}: needs rows; add them (--data)", code=ErrorCode.MISSING_VALUE, field="data")
    for source in dict.fromkeys((*request.sources, *request.recipe.rows.sources)):
        if source is not None and is_file_name(source) and not Path(source).exists():
            raise InputError(
                f"{source}: no such file of rows; check the path", code=ErrorCode.FILE_MISSING, path=Path(source)
            )
    study_class.check(request)
    if request.ray is not None and not study_class.uses_ray:
        raise UsageError(
            f"--ray {request.ray}: study {kind} has no evaluations to distribute; omit it",
            code=ErrorCode.CONTRADICTION,
            field="ray",
        )
    if request.ray is not None:
        check_reachable(request.ray)
    return study_class


def study(kind: str, request: StudyRequest, listener: Listener | None = None) -> Findings:
    """Run the missing cells of a study in the folder `request.recipe.output.out`; several processes can share them.

    Raises:
        UsageError: the folder holds another study, or this kind of study lacks a requested setting.
        InputError: the model or the rows cannot be used.
    """
    listener = listener or NullListener()
    study_class = check(kind, request)
    with listener.stage("loading the model and the rows"):
        context = StudyContext(request.recipe, request.size)
    notes = (*context.folder.notes, *(context.rows.notes if context.rows else ()))
    for note in notes:
        listener.note(note)
    stamp = _recipe(kind, study_class, request, context)
    folder = CellStore(Path(os.path.abspath(request.recipe.output.out)), stamp)  # noqa: PTH100
    instance = study_class(request, context, folder)
    cells = instance.cells()

    def run_cell(cell: Cell, work: Path, on_progress: ProgressCallback) -> Result:
        started = time.perf_counter()
        return {**instance.run(cell, work, on_progress), "seconds": round(time.perf_counter() - started, 3)}

    try:
        with evaluator_factory(request.ray) as context.make_evaluator:
            folder.run(cells, run_cell, listener)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"interrupted; the same command resumes from {folder.path}") from interrupt
    results = folder.results()
    with listener.stage("writing the findings"):
        findings = instance.findings(results)
        seconds = sum(cell["seconds"] for cell in results)
        findings.save(
            folder.path,
            kind=kind,
            description=study_class.description,
            model=request.recipe.source.model.resolve().name,
            tiles=[
                ("size", request.size.name, str(request.size).partition(": ")[2]),
                ("cells", str(len(results)), f"{seconds / 60:.1f} minutes in all"),
                ("heads", str(len(context.heads)), f"in {len(context.sites)} attention layers"),
                *([("rows", f"{len(context.rows.test):,}", "reported on")] if context.rows else []),
            ],
            facts=_facts(instance, context, stamp, notes),
        )
    return findings


def _recipe(kind: str, study_class: type[Study], request: StudyRequest, context: StudyContext) -> dict[str, Any]:
    """Everything that the cells' results depend on, besides their names."""
    fields = {
        name: value
        for name, value in request.recipe.flat().items()
        if extra_of(FIELDS[name], "heading") in study_class.groups and name not in _IGNORED_FIELDS
    }
    data = context.rows
    rows = [rows_hash(part) for part in (data.train, data.eval, data.test)] if data else []
    metric = data.task.metric if data else None
    return {
        "kind": kind,
        "size": _limits(request.size),
        "model": context.folder.fingerprint,
        "rows": rows,
        "metric": metric,
        "seed": request.recipe.selection.seed,
        "max_length": request.recipe.rows.max_length,
        **fields,
        **context.folder.surroundings,
        "sources": [_digest(source) for source in request.sources] if study_class.compares_data_sets else [],
    }


def _limits(size: StudySize) -> dict[str, Any]:
    """The limits of a size that hold for every cell."""
    return {name: value for name, value in asdict(size).items() if name not in ("seeds", "keeps")}


def _digest(source: str) -> str:
    """Identifies a data set: the digest of its file, or of the files of its folder; the name of another one."""
    path = Path(source)
    if path.is_file():
        return f"sha256:{_file_digest(path)}"
    if not path.is_dir():
        return source
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = "".join(f"{file.relative_to(path)} {_file_digest(file)}\n" for file in files)
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def _file_digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _facts(
    instance: Study, context: StudyContext, stamp: dict[str, Any], notes: tuple[Note, ...]
) -> list[tuple[str, str]]:
    recipe = instance.request.recipe
    settings = {name: value for name, value in {**stamp, **instance.settings()}.items() if name not in _SHOWN_ELSEWHERE}
    facts = [
        ("size", str(instance.request.size)),
        ("rows", f"{context.describe_rows()}; drawn with seed {recipe.selection.seed}"),
        *((name, ", ".join(map(str, instance.axis(name)))) for name in instance.axes if instance.axis(name)),
    ]
    if context.rows and "Heads" in instance.groups:
        pace = f"{recipe.selection.batch_size} rows a step, peak learning rate {recipe.selection.learning_rate:g}"
        facts.append(("learning", f"{context.steps()} steps, {pace}"))
    if recipe.selection.options:
        facts.append(("options", ", ".join(f"{name}={value}" for name, value in recipe.selection.options.items())))
    if instance.compares_data_sets and instance.request.sources:
        facts.append(("data", ", ".join(Path(source).name for source in instance.request.sources)))
    facts += [(name.replace("_", " "), _as_text(value)) for name, value in settings.items() if value is not None]
    facts += [("note", note.text) for note in notes]
    facts_of_machine = machine()
    versions = ", ".join(
        f"{name} {facts_of_machine[name]}" for name in ("torch", "transformers") if name in facts_of_machine
    )
    facts.append(("machine", f"{facts_of_machine['processor']}, {torch.get_num_threads()} threads; {versions}"))
    return facts


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
