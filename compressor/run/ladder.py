"""A ladder of budgets: which of its rungs are finished, and the page of all; `pipeline` walks those that are not."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor import report as reports
from compressor.config.fields import flag_of
from compressor.config.recipe_file import FILE_NAME
from compressor.config.run import Recipe
from compressor.config.sections import AUTO, graph_of
from compressor.config.step_list import OPTIONS_OF_STEPS, steps_of
from compressor.config.steps import Distill, Units, part_of, parts_of
from compressor.config.tasks import load_own_task
from compressor.errors import BudgetError, CompressorError, DivergedError, ErrorCode, InputError, UsageError
from compressor.processes import by_main, process_state
from compressor.progress import Listener, NullListener
from compressor.report import frontier_page
from compressor.report.frontier import ComparisonPoint, Frontier, Rung, read_points, rung_of
from compressor.results import Note, NoteCode, Report
from compressor.run.load import load_folder
from compressor.run.pipeline import run_rungs
from compressor.run.write_report import code_of
from compressor.tasks import make_task
from graph_passes import GraphPassError

_TEACHER_OUTPUTS, _WHOLE = ".teacher-outputs", ".whole"
"""Folders beside those of the rungs until the last is finished: outputs of the teacher, and the graph of the whole
model, which all rungs read."""
_PLAN = "plan.json"
_FORCED = ".forced"
"""File that `--force` leaves beside the rungs until the last is finished: older rungs run again."""


def compress_ladder(recipes: Sequence[Recipe], out: Path, listener: Listener | None = None) -> Frontier:
    """Run the rungs of a ladder and write the page of their frontier after each.

    A rung that an earlier command finished is not run again, unless its recipe, its task or a file that it reads has
    changed. A budget that nothing meets ends the ladder, and the rungs before it stay. Under `accelerate launch` every
    process learns; the worker processes end after that.

    Args:
        recipes: one recipe for each rung, from the mildest budget to the strictest, which differ in their steps and
            output folders alone; see `recipes_of`.
        out: the folder of the page, which contains the folders of the rungs.
        listener: receives stages, progress and notes.

    Returns:
        The rungs with their metrics and speeds, and the fastest of them that is within `max_drop` on evaluation rows.

    Raises:
        UsageError: `out` is the output of a run, or there are no rungs or rungs elsewhere.
        InputError: the file of `compare_points` is missing, or has a bad field or a metric above the maximum; nothing
            has run.
        CompressorError: a rung fails for another reason than its budget, or the first budget cannot be met. The page
            shows the rungs before it, and the reason; it has the reason alone where the first rung diverges.
    """
    out, listener, state = Path(out), listener or NullListener(), process_state()
    rungs = [_sharing_outputs(recipe, out) for recipe in recipes]
    finished: dict[Path, Report] = {}
    points: list[ComparisonPoint] = []

    def begin() -> list[Path]:
        """The output folders of the rungs that are finished."""
        _check_folders(recipes, out)
        points.extend(points_of(recipes[0]))
        if recipes[0].output.force and not (out / _FORCED).exists():
            out.mkdir(parents=True, exist_ok=True)
            (out / _FORCED).touch()
        finished.update(_finished(rungs, out, listener))
        return list(finished)

    kept = by_main(state, begin)
    running = run_rungs([rung for rung in rungs if rung.output.out not in kept], listener, out / _WHOLE)
    if not state.is_main_process:
        list(running)  # ends the process, unless every rung is finished
        sys.exit(0)
    name, max_drop = recipes[0].source.model.resolve().name, recipes[0].selection.max_drop
    frontier = Frontier(model=name, max_drop=max_drop, rungs=(), points=tuple(points))
    try:
        for rung in _climb(rungs, finished, running, out, listener):
            frontier = frontier.model_copy(update={"rungs": (*frontier.rungs, rung)})
            frontier_page.write(frontier, out)
    except (CompressorError, GraphPassError) as error:
        if not frontier.rungs and not isinstance(error, DivergedError):
            raise
        frontier = frontier.model_copy(update={"ended": f"{_rung_name(recipes[len(frontier.rungs)], out)}: {error}"})
        frontier_page.write(frontier, out)
        if not isinstance(error, BudgetError):
            raise
        listener.note(Note(code=NoteCode.LADDER_ENDED, text=frontier.ending))
    finally:
        if not any(_is_output(recipe.output.out) for recipe in recipes):  # nothing of the ladder stays
            (out / _FORCED).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or missing
                out.rmdir()
    shutil.rmtree(out / _TEACHER_OUTPUTS, ignore_errors=True)
    (out / _FORCED).unlink(missing_ok=True)
    return frontier


def points_of(recipe: Recipe) -> tuple[ComparisonPoint, ...]:
    """The engines of other tools that the page shows (`--compare-points`), with metrics that the task can have.

    Raises:
        InputError: the file is missing or has a bad field, or the metric of a point is above the maximum.
    """
    path = recipe.budget.compare_points
    if path is None:
        return ()
    points = read_points(path)
    task = make_task(load_folder(recipe, recipe.source.model, needs_processor=True), recipe.rows)
    for number, point in enumerate(points, 1):
        if point.metric > task.metric_maximum:
            text = (
                f"point {number}: metric: {point.metric:g} is above the maximum of {task.metric},"
                f" {task.metric_maximum:g}; give {ComparisonPoint.model_fields['metric'].description}"
            )
            raise InputError.of_file(
                path, text, ErrorCode.OUT_OF_RANGE, point=number, field="metric", value=point.metric
            )
    return points


def _check_folders(recipes: Sequence[Recipe], out: Path) -> None:
    """Raise UsageError for a page in the folder of a model or of a run, which the next run replaces, or of no rung."""
    parts = [part for recipe in recipes for part in parts_of(steps_of(recipe))]
    teachers = (part.teacher for part in parts if isinstance(part, Distill))
    models = filter(None, (*(recipe.source.model for recipe in recipes), *teachers))
    outside = [recipe.output.out for recipe in recipes if not recipe.output.out.is_relative_to(out)]
    code = ErrorCode.OUTPUT_EXISTS
    if out.resolve() in {path.resolve() for path in models}:
        reason = f"{out}: the folder of a model; write the rungs of a ladder to another folder (-o)"
    elif _is_output(out):
        reason = f"{out}: the output of a run; write the rungs of a ladder to another folder (-o)"
    elif outside or not recipes:
        code = ErrorCode.INVALID_VALUE
        reason = f"{out}: {outside or 'none'} of its rungs; give recipes that write inside of it, see recipes_of"
    elif any(_settings(recipe) != _settings(recipes[0]) for recipe in recipes):
        code = ErrorCode.CONTRADICTION
        text = "its rungs have other settings than its first one; give recipes that differ in their steps alone"
        reason = f"{out}: {text}"
    else:
        return
    raise UsageError(reason, code=code, field="out", path=out)


def _settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe that are not options of its steps."""
    return {name: value for name, value in recipe.flat().items() if name not in {*OPTIONS_OF_STEPS, "steps", "out"}}


def _is_output(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (reports.JSON_NAME, _PLAN))


def _climb(
    rungs: Sequence[Recipe], finished: Mapping[Path, Report], running: Iterator[Report], out: Path, listener: Listener
) -> Iterator[Rung]:
    """Run the rungs, or take those that are finished; a BudgetError if the budget of a rung cannot be met."""
    for number, rung in enumerate(rungs, 1):
        name = _rung_name(rung, out)
        try:
            report = finished.get(rung.output.out) or next(running)
        except UsageError as error:
            minutes = rung.distillation.minutes
            if error.details.get("field") != "minutes" or minutes is None:
                raise
            total = len(rungs) * minutes
            text = f"--minutes {total:g} for {len(rungs)} rungs gives {name} too few: {error}"
            raise UsageError(text, code=error.code, **{**error.details, "value": total}) from error
        text = f"rung {number} of {len(rungs)}, {name}: {report.verdict}"
        listener.note(Note(code=NoteCode.RUNG_FINISHED, text=text))
        yield rung_of(name, report, rung.selection.max_drop)


def _sharing_outputs(recipe: Recipe, out: Path) -> Recipe:
    """The recipe of a rung that keeps the outputs of its teacher for the others, unless it keeps them elsewhere."""
    distill = part_of(steps_of(recipe), Distill)
    if distill is None or distill.teacher_outputs is not None:
        return recipe
    return recipe.with_option(Distill, "teacher_outputs", out / _TEACHER_OUTPUTS)


def _rung_name(recipe: Recipe, out: Path) -> str:
    """Name of the folder of a rung inside that of the page."""
    return recipe.output.out.relative_to(out).as_posix()


def _finished(rungs: Sequence[Recipe], out: Path, listener: Listener) -> dict[Path, Report]:
    """Output folder of each rung that is finished -> its report; the others have to run."""
    finished: dict[Path, Report] = {}
    for rung in rungs:
        folder = rung.output.out
        if not _is_output(folder) or _is_newer(out / _FORCED, folder):
            continue
        report = reports.load(folder)
        starts = {part.start_from for part in parts_of(steps_of(rung)) if isinstance(part, Units)}
        again = [start.output.out for start in rungs if start.output.out in starts - finished.keys()]
        change = _change(rung, report, out) or (f"{again[0].name} runs again" if again else None)
        if change is None:
            finished[folder] = report
        else:
            text = f"{_rung_name(rung, out)} is out of date: {change}"
            listener.note(Note(code=NoteCode.RUNG_OUTDATED, text=text))
    return finished


def _change(recipe: Recipe, report: Report, out: Path) -> str | None:
    """What has changed since a rung was finished; None: nothing.

    Files are compared by the times of their last change, as `make` does: rows and weights may take long to read.
    """
    fields, ignored = recipe.flat(), {"teacher_outputs", "force", "compare_points"}
    if fields["seq"] is None:
        ignored.add("seq")  # compress build records the lengths that the run chose
    ignored |= {name for name in ("target", "precision") if fields[name] == AUTO}  # and the engine that it delivered
    names = sorted({*report.recipe, *fields} - ignored)
    if changed := [flag_of(name) for name in names if report.recipe.get(name) != fields.get(name)]:
        return f"its recipe has another value of {', '.join(changed)}"
    if report.task_code != code_of(load_own_task(recipe.source.task)):
        return "the code of its task has changed"
    return next((f"{path} has changed" for path in _inputs(recipe, out) if _is_newer(path, recipe.output.out)), None)


def _is_newer(path: Path, folder: Path) -> bool:
    """Whether a file was written after a run finished its folder; `compress build` writes a new report, but no plan."""
    return path.exists() and path.stat().st_mtime_ns > (folder / _PLAN).stat().st_mtime_ns


def _inputs(recipe: Recipe, out: Path) -> Iterator[Path]:
    """The files that a rung reads, and folders of rows, some of which may not exist."""
    named = [path for step in parts_of(steps_of(recipe)) for path in step.contents.values() if path is not None]
    yield from (path for path in (recipe.source.inputs, *named) if path is not None and not path.is_dir())
    models = [path for path in (recipe.source.model, *named) if path is not None and path.is_dir()]
    if recipe.graph is not None:
        yield recipe.graph
    for folder in (folder for model in models for folder in _folders_of(model)):
        files = filter(Path.is_file, folder.glob("*"))  # its subfolders may be outputs of other runs
        yield from (file for file in files if file.name != FILE_NAME)
    outputs = out.resolve()
    for rows in recipe.rows.sources:
        yield Path(rows)
        yield from (path for path in Path(rows).resolve().rglob("*") if not path.is_relative_to(outputs))


def _folders_of(model: Path) -> tuple[Path, ...]:
    """The folders that are read for a model."""
    if graph_of(model) is not None:
        return (model,)
    from compressor.model_folder import source_folders  # which needs PyTorch, as model folders do

    return source_folders(model)
