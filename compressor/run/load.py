"""The first stages of a run: the model with its sites, and its rows."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compressor import model_folder
from compressor.config.fields import flag_of
from compressor.config.run import Recipe
from compressor.config.sections import AUTO, ROW_SOURCES
from compressor.config.step_list import steps_of
from compressor.config.steps import Blocks, Follow, Step, Units, part_of, parts_of
from compressor.config.values import GroupBy
from compressor.environment import has_pytorch
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder, example_feeds
from compressor.model_folder.feeds import rows_layout
from compressor.processes import process_count
from compressor.quantization import require_nncf
from compressor.results import MissingTarget, Note, NoteCode, Report
from compressor.run.generation import require_weights
from compressor.run.run_context import LoadedModel
from compressor.run.sizes import check_requests, timed_lengths
from compressor.selection.checks import check_max_drop
from compressor.targets import target
from compressor.tasks import Data, open_data, statistics
from compressor.tasks.arrays import names_arrays, read_arrays
from compressor.tasks.calibration import draw_rows
from compressor.tasks.row_files import require_file
from compressor.tasks.scoring import forward_of, sample_of
from compressor.units import PrunableGroup, Site

_LAYOUT_ROWS = 32
"""Rows whose layout is read."""
_POINT_ROWS = 200
"""Evaluation rows on which the whole model is scored to know a point of a metric without a maximum."""


def load_folder(recipe: Recipe, path: Path, *, needs_processor: bool = False) -> ModelFolder:
    """A model folder, loaded as a recipe loads its model.

    Raises:
        InputError: the folder cannot be used.
    """
    source, rows = recipe.source, None
    if (arrays := next(filter(names_arrays, recipe.rows.sources), None)) is not None:
        # The first rows are examples of the inputs of a graph.
        part = next(iter(read_arrays(arrays).values()))[0]
        rows = {name: array[:_LAYOUT_ROWS] for name, array in part.arrays.items()}
    return model_folder.load(
        path,
        task=source.task,
        needs_processor=needs_processor,
        allow_pickle=source.allow_pickle,
        trust_remote_code=source.trust_remote_code,
        inputs=source.inputs,
        pool_in_graph=recipe.export.pool_in_graph,
        tokenizer=source.tokenizer,
        rows=rows,
    )


def load_named_folder(recipe: Recipe, field: str, path: Path) -> ModelFolder:
    """The model folder that an option of a step names; the InputError of one that cannot be used names its flag."""
    try:
        return load_folder(recipe, path)
    except InputError as error:
        details = {"field": field, **error.details}
        raise InputError(f"{flag_of(field)}: {error}", code=error.code, **details) from error


def _check_work_folders(steps: Sequence[Step]) -> None:
    """Raise UsageError for a folder in which a step keeps work for further runs, and which cannot be made."""
    for field, folder in ((name, getattr(step, name)) for step in parts_of(steps) for name in step.neutral):
        if isinstance(folder, Path) and (reason := _folder_obstacle(folder.absolute())) is not None:
            raise UsageError(
                f"{flag_of(field)} {folder}: {reason}; name another folder",
                code=ErrorCode.FILE_UNWRITABLE,
                field=field,
                value=folder,
            )


def _folder_obstacle(folder: Path) -> str | None:
    """Why a folder cannot be made, in a few words; None: it can, or exists."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        return str(error.strerror)
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if existing == folder or os.access(existing, os.W_OK) else f"{existing} cannot be written"


def load_model(recipe: Recipe, steps: Sequence[Step]) -> LoadedModel:
    """Load the model and find its sites. Errors that can be foreseen are raised here, before anything is exported.

    Raises:
        CompressorError: the target, a folder, the model or a length cannot be used.
    """
    runtime, engine = target(recipe.engine.reference.target), recipe.engine
    _check_calibration(recipe)
    _check_work_folders(steps)
    for source in filter(None, map(recipe.value, ROW_SOURCES)):
        require_file(source)
    reason = runtime.missing()
    if reason is None:
        runtime.check(precision=engine.definite_precision, provider=engine.provider, kernel=engine.kernel)
    folder = load_folder(recipe, recipe.source.model, needs_processor=True)
    require_weights(recipe, folder)
    check_requests(recipe.measure, folder)
    stored = folder.access.precision
    if engine.definite_precision == "int8" and stored != "fp32":
        raise InputError(
            f"--precision int8: {folder.source} has a graph in {stored}, and 8 bits are made from float32; export it in"
            " float32, or omit it",
            code=ErrorCode.UNSUPPORTED_MODEL,
            field="precision",
            stored=stored,
        )
    units = part_of(steps, Units)
    prunes = any(step.prunes_groups for step in steps)
    sites, groups = find_units(recipe, folder, (units.group_by if units else "kv") if prunes else None)
    if any(step.needs_heads for step in steps) and not sites:
        raise folder.access.no_heads_error()
    example_feeds(folder, 1, max(seq or 1 for seq in timed_lengths(recipe.measure, folder)))
    return LoadedModel(folder, sites, groups, None if reason is None else missing_target(recipe, reason))


def missing_target(recipe: Recipe, reason: str) -> MissingTarget:
    """The requested target of a run, which this machine lacks, with the command that builds its engine elsewhere."""
    name = recipe.engine.target
    command = shlex.join(["compress", "build", str(recipe.output.out), "--target", name])
    return MissingTarget(target=name, reason=reason, command=command)


def find_units(
    recipe: Recipe, folder: ModelFolder, group_by: GroupBy | None
) -> tuple[tuple[Site, ...], tuple[PrunableGroup, ...]]:
    """The sites of a model and all of its groups; the sites alone without a way to group heads."""
    feeds, attention, access = example_feeds(folder, 2, 8), recipe.export.attention, folder.access
    if group_by is None:
        return tuple(access.attentions(feeds, attention)), ()
    groups = tuple(access.groups(feeds, attention, group_by))
    return tuple(group.site for group in groups if group.site is not None), groups


def _check_calibration(recipe: Recipe) -> None:
    """Raise where quantized engines are requested, and there are no training rows or the quantizer is not installed."""
    engine = recipe.engine
    if not engine.allows_quantized:
        return
    if recipe.rows.data is None:
        if engine.precision == AUTO:
            return  # engines in floats need no rows
        raise UsageError(
            f"--precision {engine.precision}: there are no rows to calibrate on; add training rows (--data)",
            code=ErrorCode.MISSING_VALUE,
            fields=("precision", "data"),
        )
    if engine.precision == "int8" and (engine.target == AUTO or not target(engine.target).symmetric):
        require_nncf()


def read_rows(recipe: Recipe, steps: Sequence[Step], model: LoadedModel) -> Data:
    """Read and encode the rows of a recipe; every image that the run reads is decoded once.

    Raises:
        InputError: rows cannot be read, lack labels that `max_drop` needs, or are too few for a certificate.
        UsageError: the metric cannot fall by as much as `max_drop` allows, or an option contradicts a default for the
            task, or documents cannot be ranked.
    """
    drawn, data = _drawn_rows(recipe, steps), _open_rows(recipe, steps, model.folder)
    if drawn is not None and model.folder.image_size is not None:
        data.task.check_files(data.train.select(draw_rows(data, drawn, recipe.selection.seed)))
    max_drop = recipe.selection.max_drop
    if max_drop is not None:
        _require_labels(max_drop, recipe, steps, data)
        for task in (data.task, data.eval_task):
            check_max_drop(max_drop, task)
    if recipe.budget.match_dense:
        from compressor.training.distillation import rank_documents  # which trains by them

        rank_documents(model.folder, data, recipe.selection.seed)
    return data


def read_rows_again(report: Report, scratch: Path) -> Data | None:
    """The rows that a finished run learned from and was scored on; None where they have changed since.

    Raises:
        CompressorError: the rows or the model folder cannot be used.
    """
    # The precision of an engine built since would contradict how the run trained, or what it certified.
    of_engine = {"quantized_share": 0.0, "certify": None}
    # What a report allows to run is not run by those who build from it.
    refused = {"allow_pickle": False, "trust_remote_code": False}
    stored = {**report.recipe, **of_engine, **refused, "inputs": None, "out": scratch}
    if (tables := stored.get("steps")) is not None:
        stored["steps"] = [
            {name: {key: value for key, value in options.items() if key not in of_engine}}
            for table in tables
            for name, options in table.items()
        ]
    recipe = Recipe(**stored)
    steps = steps_of(recipe)
    data = _open_rows(recipe, steps, load_folder(recipe, recipe.source.model, needs_processor=True))
    follows = part_of(steps, Follow) is not None and part_of(steps, Blocks) is None
    return data if follows or report.plan.data in (None, data.train_hash) else None


def _open_rows(recipe: Recipe, steps: Sequence[Step], folder: ModelFolder) -> Data:
    """Read and encode the rows of a recipe, of which answers are scored where they bound a loss and are drawn."""
    drawn = _drawn_rows(recipe, steps)
    bounds_loss = recipe.selection.max_drop is not None and drawn is not None
    return open_data(recipe.rows, folder, recipe.selection.seed, drawn_rows=drawn, bounds_loss=bounds_loss)


def with_point(recipe: Recipe, data: Data, model: LoadedModel) -> tuple[Recipe, tuple[Note, ...]]:
    """The recipe with a point of the task's metric as the loss that is allowed, if it allows one; and notes on it."""
    if not recipe.allows_a_point:
        return recipe, ()
    task, rows = (data.eval_task, data.eval) if len(data.eval) else (data.task, data.test)

    def whole() -> float:
        drawn = sample_of(task, rows, _POINT_ROWS, recipe.selection.seed)
        return task.score(statistics(task, drawn, forward_of(task, model.folder.model)))

    # An interrupted run has to allow the same loss, of which few digits are certain.
    point = float(f"{task.point_of(whole):.2g}")
    text = f"the run may lose {point:g} of the {task.metric}, about a point; set another loss with --max-drop"
    notes = [Note(code=NoteCode.LOSS_ALLOWED, text=text)]
    if not has_pytorch():
        text = "the remaining units are not trained, because PyTorch (the extra cpu) is not installed"
        notes.append(Note(code=NoteCode.NOT_DISTILLED, text=text))
    return recipe.updated(max_drop=point), tuple(notes)


def with_row_layout(model: LoadedModel, data: Data) -> LoadedModel:
    """The model with example inputs whose special tokens are where the first rows of its task have them."""
    rows = next((rows for rows in (data.train, data.eval, data.test) if len(rows)), data.train)
    if "input_ids" not in rows.column_names or model.folder.example:
        return model
    layout = rows_layout(rows.select(range(min(_LAYOUT_ROWS, len(rows)))), model.folder)
    return model if layout is None else replace(model, folder=replace(model.folder, layout=layout))


def _require_labels(max_drop: float, recipe: Recipe, steps: Sequence[Step], data: Data) -> None:
    """Raise InputError where a loss of the metric is bounded, and the rows that it is measured on have no labels."""
    is_bounded = any(isinstance(part, Units) and part.is_unbounded for part in parts_of(steps))
    selects_by_metric = recipe.engine.compares or is_bounded
    if selects_by_metric and len(data.eval) and not data.scores_eval:
        rows, field = "evaluation", "eval_data"
    elif not len(data.test):
        rows, field = "test", "test_data"
    else:
        return
    raise InputError(
        f"--max-drop {max_drop:g}: the {rows} rows have no labels, and {data.task.name} cannot take the answers of the"
        f" whole model as labels; name rows that have labels ({flag_of(field)})",
        code=ErrorCode.COLUMN_MISSING,
        field=field,
        value=max_drop,
    )


def _drawn_rows(recipe: Recipe, steps: Sequence[Step]) -> int | None:
    """The number of training rows that a run draws at most, or None where it may learn from the labels of all rows."""
    compares = recipe.rows.data is not None and recipe.engine.chooses
    drawn = [step.rows_drawn(process_count()) for step in steps]
    follows_alone = bool(steps) and all(isinstance(step, Follow) for step in steps)
    if any(step.reads_labels for step in steps) or not (any(drawn) or compares or follows_alone):
        return None
    return max(*drawn, recipe.engine.calibration_rows if recipe.engine.allows_quantized else 0, 0)
