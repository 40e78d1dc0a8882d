"""The tasks, one line each, and the one that serves a model folder."""

from __future__ import annotations

from typing import Any

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, UsageError, nearest
from compressor.model_folder import ModelFolder
from compressor.tasks.base import Task
from compressor.tasks.causal_lm import CausalLM
from compressor.tasks.classification import TextClassification
from compressor.tasks.metrics import Metric
from compressor.tasks.question_answering import QuestionAnswering
from compressor.tasks.regression import Regression
from compressor.tasks.segment_streams import CharacterStreams, Streams
from compressor.tasks.translation import Translation

TASKS: tuple[type[Task], ...] = (
    TextClassification,
    Regression,
    CharacterStreams,
    Streams,
    CausalLM,
    Translation,
    QuestionAnswering,
)
"""Each is constructed from a folder, the rows of a recipe and a metric; of several classes of one name, the first that
accepts the folder is used."""


def make_task(folder: ModelFolder, request: RowsConfig) -> Task:
    """The task of a folder with the columns, longest row and metric of a recipe.

    Raises:
        InputError: rows cannot be read for the task, or the folder has no tokenizer.
        UsageError: the task does not have the metric.
    """
    names = list(dict.fromkeys(task.name for task in TASKS))
    if folder.task not in names:
        raise InputError(
            f"{folder.path}: rows cannot be read for the task {folder.task}, only for {', '.join(names)}; name one of"
            " these (--task), or run without data and with a plan",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=folder.path,
            task=folder.task,
        )
    if folder.processor is None:
        raise InputError(
            f"{folder.path}: no tokenizer; save that of the model there (tokenizer.save_pretrained)",
            code=ErrorCode.FILE_MISSING,
            path=folder.path,
        )
    task_class: Any = next(task for task in TASKS if task.name == folder.task and task.accepts(folder))
    metrics = {metric.name: metric for metric in task_class.metrics}
    name = request.metric or task_class.metrics[0].name
    if name not in metrics:
        raise UsageError(
            f"--metric {name}: {folder.task} has the metrics {', '.join(metrics)}; name one of these",
            code=ErrorCode.UNKNOWN_NAME,
            field="metric",
            value=name,
            known=tuple(metrics),
        )
    task: Task = task_class(folder, request, metrics[name])
    return task


def metric_named(name: str) -> Metric:
    """The metric of a name, for stored results that hold no unit; tasks that share a name share its unit.

    Raises:
        UsageError: no task has a metric of this name.
    """
    metrics = {metric.name: metric for task in TASKS for metric in task.metrics}
    if name not in metrics:
        raise UsageError(
            f"metric {name!r}: unknown; {nearest(name, list(metrics))}",
            code=ErrorCode.UNKNOWN_NAME,
            field="metric",
            value=name,
            known=tuple(metrics),
        )
    return metrics[name]
