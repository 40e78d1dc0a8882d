"""A ladder of budgets: each rung is a finished run that goes on from the one before."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from compressor import report as reports
from compressor.config.own_tasks import load_own_task
from compressor.config.run import Recipe
from compressor.errors import BudgetError, ErrorCode, UsageError
from compressor.progress import Listener, NullListener
from compressor.report import frontier_page
from compressor.report.frontier import Frontier, Rung, rung_of
from compressor.results import Note, NoteCode, Report
from compressor.run.pipeline import compress
from compressor.run.write_report import code_of
from compressor.training.processes import process_count

_TEACHER_OUTPUTS = "teacher-outputs"
"""Folder of the teacher's outputs, which all rungs use, inside that of the rungs until the last is finished."""


def compress_ladder(
    recipes: Sequence[Recipe],
    out: Path,
    listener: Listener | None = None,
    *,
    others: Mapping[str, Sequence[Recipe]] = MappingProxyType({}),
) -> Frontier:
    """Run the rungs of a ladder and write the page of their frontier after each.

    A rung that an earlier command finished is not run again. A budget that nothing meets ends the ladder, and the rungs
    before it stay.

    Args:
        recipes: one recipe for each rung, from the mildest budget to the strictest; see `recipes_of`.
        out: the folder of the page, which contains the folders of the rungs.
        listener: receives stages, progress and notes.
        others: ladders of other methods, which the page shows beside it; see `compared_ladders`.

    Raises:
        UsageError: there are several processes.
        CompressorError: a rung fails for another reason than its budget, or the first budget cannot be met. The page
            shows the rungs before it.
    """
    if process_count() > 1:
        raise UsageError(
            "a ladder runs in one process; run its rungs one by one under accelerate launch, each with --start-from the"
            " folder of the one before",
            code=ErrorCode.CONTRADICTION,
        )
    listener = listener or NullListener()
    frontier = Frontier(model=recipes[0].source.model.resolve().name, max_drop=recipes[0].selection.max_drop, rungs=())
    try:
        for rung in _climb(recipes, out, listener):
            frontier = frontier.model_copy(update={"rungs": (*frontier.rungs, rung)})
            frontier_page.write(frontier, out)
    except _EndOfLadderError as error:
        frontier = frontier.model_copy(update={"ended": str(error)})
        frontier_page.write(frontier, out)
    for method, ladder in others.items():
        with contextlib.suppress(_EndOfLadderError):
            for rung in _climb(ladder, out, listener):
                rungs = {**frontier.others, method: (*frontier.others.get(method, ()), rung)}
                frontier = frontier.model_copy(update={"others": rungs})
                frontier_page.write(frontier, out)
    shutil.rmtree(out / _TEACHER_OUTPUTS, ignore_errors=True)
    return frontier


class _EndOfLadderError(Exception):
    """The budget of a rung cannot be met; the message names it."""


def _climb(recipes: Sequence[Recipe], out: Path, listener: Listener) -> Iterator[Rung]:
    """Run the rungs of one method, or take those that are finished.

    Raises:
        _EndOfLadderError: the budget of a rung after the first cannot be met.
        CompressorError: a rung fails.
    """
    for number, recipe in enumerate(recipes, 1):
        name = recipe.output.out.relative_to(out).as_posix()
        shares_outputs = recipe.distills and recipe.distillation.teacher_outputs is None
        rung = recipe.updated(teacher_outputs=out / _TEACHER_OUTPUTS) if shares_outputs else recipe
        try:
            report = _finished(rung) or compress(rung, listener)
        except BudgetError as error:
            if number == 1:
                raise
            note = Note(code=NoteCode.LADDER_ENDED, text=f"the ladder ends before {name}: {error}")
            listener.note(note)
            raise _EndOfLadderError(f"{name}: {error}") from error
        text = f"rung {number} of {len(recipes)}, {name}: {report.verdict}"
        listener.note(Note(code=NoteCode.RUNG_FINISHED, text=text))
        yield rung_of(name, report, recipe.selection.max_drop)


def _finished(recipe: Recipe) -> Report | None:
    """The report of a rung that is finished; None if it has to run."""
    folder = recipe.output.out
    if recipe.output.force or not (folder / reports.JSON_NAME).is_file():
        return None
    report = reports.load(folder)
    ignored = {"teacher_outputs": None, "force": False}
    is_same_recipe = {**report.recipe, **ignored} == {**recipe.flat(), **ignored}
    return report if is_same_recipe and report.task_code == code_of(load_own_task(recipe.source.task)) else None
