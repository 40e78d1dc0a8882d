"""Rows on which the metric of a task is not defined."""

from __future__ import annotations

from collections.abc import Mapping

from datasets import Dataset

from compressor.errors import ErrorCode, InputError
from compressor.tasks.base import Task
from compressor.tasks.run_splits import PURPOSES
from compressor.tasks.splits import Split


def require_metric(task: Task, scored: Mapping[Split, Dataset]) -> None:
    """Check that the metric of a task is defined on rows.

    Args:
        task: the task.
        scored: encoded rows by split.

    Raises:
        InputError: it is not.
    """
    for split, rows in scored.items():
        if (obstacle := task.metric_obstacle(rows)) is not None:
            raise InputError(
                f"{obstacle} in the {PURPOSES[split]} rows, so that there is no {task.metric}; name other rows"
                f" (--{split}-data)",
                code=ErrorCode.INVALID_ROWS,
                field=f"{split}_data",
            )
