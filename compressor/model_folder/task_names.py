"""Names of tasks: of this package, of optimum, and the task of a class of transformers by its name."""

from __future__ import annotations

from typing import Any

from compressor.answers import AnswerKind, answer_kind
from compressor.errors import ErrorCode, UsageError

RENAMED = {"text-generation": "causal-lm"}
"""Optimum's name of a task -> its name in this package, where they differ."""

KINDS = {"multi-label-classification": AnswerKind.CLASSES, "regression": AnswerKind.NUMBERS}
"""Task of a classifier -> kind of its answers, if these are not single classes."""
_HEADS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForMultipleChoice": "multiple-choice",
    "ForImageClassification": "image-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "ModelWithProjection": "feature-extraction",
    "Model": "feature-extraction",
}
"""End of the name of a class of transformers -> optimum's name of its task; longer ends come first."""


def task_of_class(name: str) -> str | None:
    """Optimum's name of the task of a class of transformers, by its name; None: it is not known."""
    return next((task for end, task in _HEADS.items() if name.endswith(end)), None)


def requested_task(task: str, config: Any) -> str:
    """The name of a requested task in this package, whose kind of answers is written into the configuration.

    Raises:
        UsageError: the configuration declares another kind.
    """
    if task in KINDS:
        declare_kind(task, config)
        return task
    is_single = answer_kind(config) is not AnswerKind.CLASSES and (config.num_labels or 0) > 1
    if task == "text-classification" and not is_single:
        return task_name(task, config)
    return RENAMED.get(task, task)


def declare_kind(task: str, config: Any) -> None:
    """Write the kind of answers of a task into a configuration; raise UsageError if that declares another kind."""
    kind, declared = KINDS[task], getattr(config, "problem_type", None)
    if kind is AnswerKind.NUMBERS and config.num_labels == 1:
        return
    if declared not in (None, kind):
        raise UsageError(
            f"--task {task}: the model was trained for {declared} (problem_type in config.json); omit --task, or"
            " correct that entry",
            code=ErrorCode.CONTRADICTION,
            field="task",
            value=task,
            problem_type=declared,
        )
    problem_type: Any = kind.value
    config.problem_type = problem_type


def task_name(optimum_task: str, config: Any) -> str:
    """The name of a task in this package; that of a classifier depends on the kind of its answers."""
    kinds = {kind: name for name, kind in KINDS.items()}
    if optimum_task == "text-classification" and answer_kind(config) in kinds:
        return kinds[answer_kind(config)]
    return RENAMED.get(optimum_task, optimum_task)
