"""Check the options of steps that learn before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compressor.config.methods import METHODS
from compressor.config.steps import Blocks, Heads, Step, Units, parts_of
from compressor.errors import ErrorCode, UsageError
from compressor.selection.certify import check_rows_unseen, split_rows
from compressor.selection.options import (
    PoolOptions,
    ScheduleOptions,
    check_option_names,
    option_names,
    read_method_options,
    read_options,
)
from compressor.selection.ray_search.cluster import check_reachable
from compressor.tasks import Task
from compressor.tasks.data import Data

TRAINING_WITH_MASKS = "training with masks"
"""Name of the training of a step that drops blocks, in messages about its schedule options."""


def known_options(step: Heads | Units | Blocks) -> dict[str, Any]:
    """The options that a step reads. Flags set those of all steps together."""
    names = _option_names(step)
    return {name: value for name, value in step.options.items() if name in names}


def _option_names(step: Heads | Units | Blocks) -> tuple[str, ...]:
    return tuple(ScheduleOptions.model_fields) if isinstance(step, Blocks) else option_names(step.method)


def check_every_option(steps: Sequence[Step]) -> None:
    """Raise UsageError unless some step reads each option; steps that have the same options share them."""
    learning = [step for step in parts_of(steps) if isinstance(step, Heads | Units | Blocks)]
    for step in learning:
        sharing = (member for member in learning if member.options == step.options)
        names = tuple(dict.fromkeys(name for member in (step, *sharing) for name in _option_names(member)))
        subject = TRAINING_WITH_MASKS if isinstance(step, Blocks) else step.method
        check_option_names(subject, step.options, names)


def check_options(step: Heads | Units | Blocks) -> None:
    """Check the values of the options of a step, without a model.

    Raises:
        UsageError: a value is invalid or out of range.
        TargetMissingError: the requested Ray workers are not available.
    """
    if not isinstance(step, Blocks):
        read_method_options(step.method, step.options)
        if isinstance(step, Heads) and step.ray is not None and METHODS[step.method].kind != "gate":
            check_reachable(step.ray)
    if isinstance(step, Blocks) or METHODS[step.method].kind == "gate":
        subject = TRAINING_WITH_MASKS if isinstance(step, Blocks) else step.method
        read_options(subject, step.options, ScheduleOptions).schedule(step, training_steps=1)


def check_task_options(step: Heads | Units, task: str) -> None:
    """Raise UsageError if an option of the method contradicts a default for a task, by the task's name."""
    read_method_options(step.method, step.options, task)


def check_pool(step: Units) -> None:
    """Raise UsageError unless a gate that learns within a budget has all units compete."""
    pool = read_options(step.method, step.options, PoolOptions).pool
    if pool != "model":
        raise UsageError(
            f"option pool={pool} of {step.method}: within a budget all heads and neurons compete; omit the option, or "
            f"set the number of heads (--keep)",
            code=ErrorCode.CONTRADICTION,
            field="pool",
            value=pool,
        )


def check_max_drop(max_drop: float, task: Task) -> None:
    """Raise UsageError if the metric cannot fall as far as is allowed."""
    if max_drop >= task.metric_maximum:
        raise UsageError(
            f"--max-drop {max_drop:g}: {task.metric} is at most {task.metric_maximum:g}, so any result would pass; "
            f"choose a smaller value, e.g. 0.01",
            code=ErrorCode.OUT_OF_RANGE,
            field="max_drop",
            value=max_drop,
            metric=task.metric,
        )


def check_certificate(step: Heads | Units, data: Data) -> None:
    """Check that the loss of a step can be certified, where that is requested; see `split_rows` for the errors."""
    if step.certify is not None:
        assert step.max_drop is not None
        split_rows(data.eval, data.task, step.max_drop, step.certify, step.seed)
        check_rows_unseen(data)
