"""Check the configuration of a selection before anything is computed."""

from __future__ import annotations

from compressor.config.methods import METHODS
from compressor.config.sections import SelectionConfig
from compressor.errors import ErrorCode, UsageError
from compressor.selection.certified_rows import check_rows_unseen
from compressor.selection.certify import split_rows
from compressor.selection.options import (
    PoolOptions,
    ScheduleOptions,
    check_option_names,
    option_models,
    option_names,
    read_options,
)
from compressor.selection.ray_search.cluster import check_reachable
from compressor.tasks.data import Data

TRAINING_WITH_MASKS = "training with masks"
"""Name in messages of what reads the schedule options if no method does."""


def check_options(selection: SelectionConfig, *, heads: bool = True, blocks: bool = False) -> None:
    """Check the options of learning, without a model.

    Args:
        selection: method and options.
        heads: heads are selected, so the options of the method are read.
        blocks: the model trains with masks afterwards, so the options of the schedule are read.

    Raises:
        UsageError: an option does not exist, has an invalid value or is out of range.
        TargetMissingError: the requested Ray workers are not available.
    """
    names = option_names(selection.method) if heads else ()
    options = dict(selection.options)
    if blocks:
        schedule = set(ScheduleOptions.model_fields)
        _check_schedule(TRAINING_WITH_MASKS, selection)
        if not heads:
            check_option_names(TRAINING_WITH_MASKS, options, tuple(ScheduleOptions.model_fields))
        options = {name: value for name, value in options.items() if name in names or name not in schedule}
    if not heads:
        return
    check_option_names(selection.method, options, names)
    for model in option_models(selection.method):
        read_options(selection.method, options, model)
    if METHODS[selection.method].kind == "gate":
        _check_schedule(selection.method, selection)
    elif selection.ray is not None:
        check_reachable(selection.ray)


def check_task_options(selection: SelectionConfig, task: str) -> None:
    """Check the options of the method against its defaults for a task, by the task's name.

    Raises:
        UsageError: an option contradicts a default for the task.
    """
    for model in option_models(selection.method):
        read_options(selection.method, selection.options, model, task)


def check_pool(selection: SelectionConfig) -> None:
    """Check that a gate that learns within a budget has all units compete.

    Raises:
        UsageError: the option `pool` divides the heads.
    """
    pool = read_options(selection.method, selection.options, PoolOptions).pool
    if pool != "model":
        raise UsageError(
            f"option pool={pool} of {selection.method}: within a budget all heads and neurons compete; omit it, or set"
            " the number of heads (--keep)",
            code=ErrorCode.CONTRADICTION,
            field="pool",
            value=pool,
        )


def _check_schedule(subject: str, selection: SelectionConfig) -> None:
    """Raise UsageError unless the schedule options are valid; `subject` names their reader in messages."""
    schedule_options = read_options(subject, selection.options, ScheduleOptions)
    schedule_options.schedule(1, selection.batch_size, selection.learning_rate, selection.seed)


def check_budget(selection: SelectionConfig, data: Data) -> None:
    """Check the allowed loss (`max_drop`) against the metric and the number of rows.

    Raises:
        UsageError: the metric cannot fall so far, or cannot be certified.
        InputError: there are too few rows for a certificate, or they are training rows too.
    """
    if selection.max_drop is None:
        return
    task = data.task.chooser if selection.keep is None and selection.searches else data.task
    if selection.max_drop >= task.metric_maximum:
        raise UsageError(
            f"--max-drop {selection.max_drop:g}: {task.metric} is at most {task.metric_maximum:g}, so any result would"
            " pass; choose less, e.g. 0.01",
            code=ErrorCode.OUT_OF_RANGE,
            field="max_drop",
            value=selection.max_drop,
            metric=task.metric,
        )
    if selection.certify is not None:
        split_rows(data.eval, data.task, selection.max_drop, selection.certify, selection.seed)
        check_rows_unseen(data)
