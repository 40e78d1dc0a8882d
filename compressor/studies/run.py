"""A study from beginning to end: open the folder, run the cells that are missing, write what they amount to."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compressor.config.fields import heading_of
from compressor.config.run import FIELDS
from compressor.config.study import RESERVED, StudyRequest, StudySize
from compressor.environment import machine
from compressor.errors import ErrorCode, UsageError, nearest
from compressor.progress import Listener, NullListener, ProgressCallback
from compressor.results import Note
from compressor.selection.ray_evaluator import evaluator_factory
from compressor.studies import page
from compressor.studies.ablate import Ablate
from compressor.studies.astar import AStar
from compressor.studies.base import Result, Study, check_request
from compressor.studies.blocks import Blocks
from compressor.studies.cell_store import Cell, StudyFolder
from compressor.studies.context import StudyContext
from compressor.studies.dynamics import Dynamics
from compressor.studies.grid import Grid
from compressor.studies.importance import Importance
from compressor.studies.penalty import Penalty
from compressor.studies.results import Findings
from compressor.studies.speed import SpeedStudy
from compressor.tasks.data import rows_hash

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
_NOT_ITS_OWN = (*RESERVED, "seed")
"""Fields of a recipe that a study decides itself, that change no result, or that every study depends on."""
_TOLD = (
    *("kind", "size", "model", "rows", "seed", "sources"),
    *("steps", "batch_size", "learning_rate", "options"),
)
"""What of a study's recipe the page says elsewhere: in its head, or beside other facts."""


def check(kind: str, request: StudyRequest) -> type[Study]:
    """The study of that kind, if it can be asked for this; nothing is loaded.

    Raises:
        UsageError: an unknown kind, or something that it would not look at.
        InputError: something that it reads is not there.
        TargetMissingError: the workers asked for cannot be had.
    """
    if kind not in KINDS:
        raise UsageError(
            f"study {kind!r}: unknown; {nearest(kind, list(KINDS))}",
            code=ErrorCode.UNKNOWN_NAME,
            field="kind",
            value=kind,
        )
    check_request(kind, KINDS[kind], request)
    return KINDS[kind]


def study(kind: str, request: StudyRequest, listener: Listener | None = None) -> Findings:
    """Do a study, or what is left of it, in the folder `asked.recipe.output.out`; several processes may do it together.

    Raises:
        UsageError: the folder holds another study, or something is asked for that this kind does not have.
        InputError: the model or the rows cannot be used.
    """
    listen = listener or NullListener()
    make = check(kind, request)
    with listen.stage("loading the model and the rows"):
        context = StudyContext(request.recipe, request.size)
    notes = (*context.folder.notes, *(context.rows.notes if context.rows else ()))
    for note in notes:
        listen.note(note)
    stamp = _recipe(kind, make, request, context)
    folder = StudyFolder(Path(os.path.abspath(request.recipe.output.out)), stamp)  # noqa: PTH100
    instance = make(request, context, folder)
    cells = instance.cells()

    def do(cell: Cell, work: Path, tell: ProgressCallback) -> Result:
        started = time.perf_counter()
        return {**instance.run(cell, work, tell), "seconds": round(time.perf_counter() - started, 3)}

    try:
        with evaluator_factory(request.ray) as context.make_trials:
            folder.run(cells, do, listen)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"interrupted; the same command resumes from {folder.path}") from interrupt
    results = folder.results()
    with listen.stage("writing the findings"):
        facts_of_machine = instance.findings(results)
        seconds = sum(cell["seconds"] for cell in results)
        page.save(
            facts_of_machine,
            folder.path,
            kind=kind,
            says=make.says,
            model=request.recipe.source.model.resolve().name,
            tiles=[
                ("size", request.size.name, str(request.size).partition(": ")[2]),
                ("cells", str(len(results)), f"{seconds / 60:.1f} minutes in all"),
                ("heads", str(len(context.heads)), f"in {len(context.sites)} attention layers"),
                *([("rows", f"{len(context.rows.test):,}", "reported on")] if context.rows else []),
            ],
            facts=_facts(instance, context, stamp, notes),
        )
    return facts_of_machine


def _recipe(kind: str, make: type[Study], request: StudyRequest, context: StudyContext) -> dict[str, Any]:
    """What every cell's result depends on, beside its name."""
    fields = {
        name: value
        for name, value in request.recipe.flat().items()
        if heading_of(FIELDS[name]) in make.groups and name not in _NOT_ITS_OWN
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
        "sources": [_digest(source) for source in request.sources] if make.several else [],
    }


def _limits(size: StudySize) -> dict[str, Any]:
    """What of a size is the same in every cell."""
    return {name: value for name, value in asdict(size).items() if name not in ("seeds", "keeps")}


def _digest(source: str) -> str:
    """What a data set is known by: its file's content, or its name."""
    path = Path(source)
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" if path.is_file() else source


def _facts(
    instance: Study, context: StudyContext, stamp: dict[str, Any], notes: tuple[Note, ...]
) -> list[tuple[str, str]]:
    recipe = instance.request.recipe
    settings = {name: value for name, value in {**stamp, **instance.settings()}.items() if name not in _TOLD}
    facts = [
        ("size", str(instance.request.size)),
        ("rows", f"{context.rows_told()}; drawn with seed {recipe.selection.seed}"),
        *((name, ", ".join(map(str, instance.axis(name)))) for name in instance.axes if instance.axis(name)),
    ]
    if context.rows and "Heads" in instance.groups:
        pace = f"{recipe.selection.batch_size} rows a step, peak learning rate {recipe.selection.learning_rate:g}"
        facts.append(("learning", f"{context.steps()} steps, {pace}"))
    if recipe.selection.options:
        facts.append(("options", ", ".join(f"{name}={value}" for name, value in recipe.selection.options.items())))
    if instance.several and instance.request.sources:
        facts.append(("data", ", ".join(Path(source).name for source in instance.request.sources)))
    facts += [(name.replace("_", " "), _as_told(value)) for name, value in settings.items() if value is not None]
    facts += [("note", note.text) for note in notes]
    facts_of_machine = machine()
    versions = ", ".join(
        f"{name} {facts_of_machine[name]}" for name in ("torch", "transformers") if name in facts_of_machine
    )
    facts.append(("machine", f"{facts_of_machine['processor']}, {torch.get_num_threads()} threads; {versions}"))
    return facts


def _as_told(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
