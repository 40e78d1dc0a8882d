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
from compressor.errors import UsageError, nearest
from compressor.progress import Listener, NullListener, ProgressCallback
from compressor.selection.ray_evaluator import evaluator_factory
from compressor.studies import page
from compressor.studies.ablate import Ablate
from compressor.studies.astar import AStar
from compressor.studies.base import Result, Study, check_asked
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


def check(kind: str, asked: StudyRequest) -> type[Study]:
    """The study of that kind, if it can be asked for this; nothing is loaded.

    Raises:
        UsageError: an unknown kind, or something that it would not look at.
        InputError: something that it reads is not there.
        TargetMissingError: the workers asked for cannot be had.
    """
    if kind not in KINDS:
        raise UsageError(f"study {kind!r}: unknown; {nearest(kind, list(KINDS))}")
    check_asked(kind, KINDS[kind], asked)
    return KINDS[kind]


def study(kind: str, asked: StudyRequest, listener: Listener | None = None) -> Findings:
    """Do a study, or what is left of it, in the folder `asked.recipe.output.out`; several processes may do it together.

    Raises:
        UsageError: the folder holds another study, or something is asked for that this kind does not have.
        InputError: the model or the rows cannot be used.
    """
    listen = listener or NullListener()
    make = check(kind, asked)
    with listen.stage("loading the model and the rows"):
        subject = StudyContext(asked.recipe, asked.size)
    notes = (*subject.folder.notes, *(subject.given.notes if subject.given else ()))
    for note in notes:
        listen.note(note)
    stamp = _recipe(kind, make, asked, subject)
    folder = StudyFolder(Path(os.path.abspath(asked.recipe.output.out)), stamp)  # noqa: PTH100
    made = make(asked, subject, folder)
    cells = made.cells()

    def do(cell: Cell, work: Path, tell: ProgressCallback) -> Result:
        started = time.perf_counter()
        return {**made.run(cell, work, tell), "seconds": round(time.perf_counter() - started, 3)}

    try:
        with evaluator_factory(asked.ray) as subject.make_trials:
            folder.run(cells, do, listen)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"interrupted; the same command goes on from {folder.path}") from interrupt
    results = folder.results()
    with listen.stage("writing what was found"):
        found = made.findings(results)
        seconds = sum(cell["seconds"] for cell in results)
        page.save(
            found,
            folder.path,
            kind=kind,
            says=make.says,
            model=asked.recipe.source.model.resolve().name,
            tiles=[
                ("size", asked.size.name, str(asked.size).partition(": ")[2]),
                ("cells", str(len(results)), f"{seconds / 60:.1f} minutes in all"),
                ("heads", str(len(subject.heads)), f"in {len(subject.sites)} attention layers"),
                *([("rows", f"{len(subject.given.test):,}", "reported on")] if subject.given else []),
            ],
            facts=_facts(made, subject, stamp, notes),
        )
    return found


def _recipe(kind: str, make: type[Study], asked: StudyRequest, subject: StudyContext) -> dict[str, Any]:
    """What every cell's result depends on, beside its name."""
    fields = {
        name: value
        for name, value in asked.recipe.flat().items()
        if heading_of(FIELDS[name]) in make.groups and name not in _NOT_ITS_OWN
    }
    data = subject.given
    rows = [rows_hash(part) for part in (data.train, data.eval, data.test)] if data else []
    metric = data.task.metric if data else None
    return {
        "kind": kind,
        "size": _limits(asked.size),
        "model": subject.folder.fingerprint,
        "rows": rows,
        "metric": metric,
        "seed": asked.recipe.selection.seed,
        "max_length": asked.recipe.rows.max_length,
        **fields,
        "sources": [_digest(source) for source in asked.sources] if make.several else [],
    }


def _limits(size: StudySize) -> dict[str, Any]:
    """What of a size is the same in every cell."""
    return {name: value for name, value in asdict(size).items() if name not in ("seeds", "keeps")}


def _digest(source: str) -> str:
    """What a data set is known by: its file's content, or its name."""
    path = Path(source)
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" if path.is_file() else source


def _facts(made: Study, subject: StudyContext, stamp: dict[str, Any], notes: tuple[str, ...]) -> list[tuple[str, str]]:
    recipe = made.asked.recipe
    settings = {name: value for name, value in {**stamp, **made.settings()}.items() if name not in _TOLD}
    facts = [
        ("size", str(made.asked.size)),
        ("rows", f"{subject.rows_told()}; drawn with seed {recipe.selection.seed}"),
        *((name, ", ".join(map(str, made.axis(name)))) for name in made.axes if made.axis(name)),
    ]
    if subject.given and "Heads" in made.groups:
        pace = f"{recipe.selection.batch_size} rows a step, peak learning rate {recipe.selection.learning_rate:g}"
        facts.append(("learning", f"{subject.steps()} steps, {pace}"))
    if recipe.selection.options:
        facts.append(("options", ", ".join(f"{name}={value}" for name, value in recipe.selection.options.items())))
    if made.several and made.asked.sources:
        facts.append(("data", ", ".join(Path(source).name for source in made.asked.sources)))
    facts += [(name.replace("_", " "), _as_told(value)) for name, value in settings.items() if value is not None]
    facts += [("note", note) for note in notes]
    found = machine()
    told = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers") if name in found)
    facts.append(("machine", f"{found['processor']}, {torch.get_num_threads()} threads; {told}"))
    return facts


def _as_told(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
