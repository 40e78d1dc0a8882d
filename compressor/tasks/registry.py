"""The tasks by name, and how one is made for a model folder and a recipe."""

from __future__ import annotations

from compressor.errors import InputError, UsageError
from compressor.model_folder import ModelFolder
from compressor.tasks.base import DataRequest, Task
from compressor.tasks.causal_lm import CausalLM
from compressor.tasks.classification import TextClassification
from compressor.tasks.question_answering import QuestionAnswering
from compressor.tasks.regression import Regression
from compressor.tasks.segment_streams import remembers, streams_of
from compressor.tasks.translation import Translation

_Class = type[TextClassification] | type[Regression] | type[CausalLM] | type[Translation] | type[QuestionAnswering]

TASKS: dict[str, _Class] = {
    TextClassification.name: TextClassification,
    Regression.name: Regression,
    CausalLM.name: CausalLM,
    Translation.name: Translation,
    QuestionAnswering.name: QuestionAnswering,
}


def make_task(folder: ModelFolder, request: DataRequest) -> Task:
    """The folder's task, with the recipe's columns, length and metric.

    Raises:
        InputError: the task is none that rows can be read for, or the folder has no tokenizer.
        UsageError: the metric is not one of the task's.
    """
    make = TASKS.get(folder.task)
    if make is None:
        raise InputError(
            f"{folder.path}: rows for the task {folder.task} are not read, only for {', '.join(TASKS)}; name one of"
            " these (--task), or run without data and with a plan"
        )
    if folder.processor is None:
        raise InputError(f"{folder.path}: no tokenizer; save the model's own there (tokenizer.save_pretrained)")
    if make is CausalLM and remembers(folder.config):
        make = streams_of(folder)
    metric = request.metric or make.metrics[0]
    if metric not in make.metrics:
        raise UsageError(f"--metric {metric}: {folder.task} is scored by {', '.join(make.metrics)}; name one of these")
    return make(folder, request, metric)
