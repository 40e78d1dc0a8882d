"""The task of a model folder, and the metrics of all tasks."""

from __future__ import annotations

from typing import Any

from compressor.config.sections import RowsConfig
from compressor.config.tasks import TASK_NAMES, TASKS
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.graph.program import HasSignature
from compressor.model_folder import ModelFolder
from compressor.silence_libraries import one_line
from compressor.tasks.base import Task


def task_classes() -> tuple[type[Task], ...]:
    """The class of every entry of `compressor.config.tasks.TASKS`, in order."""
    return tuple(entry.load() for entry in TASKS)


def make_task(folder: ModelFolder, request: RowsConfig) -> Task:
    """The task of a folder, with the columns, maximum length and metric of a recipe.

    Raises:
        InputError: rows cannot be read for the task, or the folder has no tokenizer or image processor.
        UsageError: the task does not have the metric.
    """
    if folder.own_task is None and folder.task not in TASK_NAMES:
        raise InputError(
            f"{folder.source}: rows cannot be read for the task {folder.task}, only for {', '.join(TASK_NAMES)}; name"
            " one of these or a custom task (--task), or run without data and with a plan",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=folder.source,
            task=folder.task,
        )
    task_class = _task_class(folder)
    task_class.check_processor(folder)
    metrics = {metric.name: metric for metric in task_class.metrics}
    name = request.metric or task_class.metrics[0].name
    if name not in metrics:
        raise UsageError(
            f"--metric {name}: {task_class.name} has the metrics {', '.join(metrics)}; name one of these",
            code=ErrorCode.UNKNOWN_NAME,
            field="metric",
            value=name,
            known=tuple(metrics),
        )
    try:
        task: Task = task_class(folder, request, metrics[name])
    except TypeError as error:
        if folder.own_task is None:
            raise
        raise UsageError(
            f"--task {folder.own_task.path}: cannot be created ({one_line(error)}); take the arguments of"
            " compressor.tasks.Task: folder, request and metric",
            code=ErrorCode.TASK_FAILED,
            field="task",
            value=folder.own_task.path,
        ) from error
    if isinstance(folder.model, HasSignature) and folder.sentence is None:
        outputs = folder.model.output_specs
        task.use_outputs([name for name, output in outputs.items() if output.dtype.kind == "f"])
    return task


def _task_class(folder: ModelFolder) -> Any:
    """The custom task of a folder, which must accept the folder, else the first class of its task that accepts it."""
    if folder.own_task is None:
        classes = (entry.load() for entry in TASKS if entry.name == folder.task)
        return next(task for task in classes if task.accepts(folder))
    task_class = folder.own_task.task_class
    if not task_class.accepts(folder):
        raise InputError(
            f"{folder.source}: {task_class.name} does not accept this model; name another task (--task)",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=folder.source,
            task=task_class.name,
        )
    return task_class
