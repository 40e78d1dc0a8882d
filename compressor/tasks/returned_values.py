"""Checks of the values that methods of custom tasks return, so that an error names the method and not its caller."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Sized
from numbers import Real
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from torch import Tensor

from compressor.errors import ErrorCode, UsageError

_PACKAGE = __name__.partition(".")[0]
_LISTED = 6
"""Maximum number of columns or keys that an error message lists."""

Requirement = Callable[..., str | None]
"""From a task, a value that its method returned, and the arguments: what has to be returned; None: it is returned."""


class ReturnedValues:
    """Base class that checks what methods of `Task` return in classes outside of this package.

    The methods of a class are wrapped once, where the class is defined. A value of another type or size ends with a
    UsageError that names the method, as an error inside of it does (`own_tasks.error_of_own_task`).
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.partition(".")[0] != _PACKAGE:
            for name in _REQUIREMENTS.keys() & vars(cls).keys():
                if hasattr(vars(cls)[name], "__get__"):  # a method
                    setattr(cls, name, _checked(cls, name))


def require_number(value: Any, source: Any) -> float:
    """The value of a metric.

    Args:
        value: what the function of the metric returned.
        source: that function.

    Raises:
        UsageError: it is not a number.
    """
    if _is_number(value):
        return float(value)
    named = source if hasattr(source, "__qualname__") else type(source)
    raise _error(f"{named.__module__}:{named.__qualname__}", value, "a number")


def pop_labels(task: Any, batch: MutableMapping[str, Tensor], count: int) -> np.ndarray:
    """Take the labels out of a collated batch.

    Args:
        task: the task that collated it.
        batch: the batch; its labels are removed.
        count: number of its examples.

    Raises:
        UsageError: it has no labels, or not one element for each example.
    """
    labels = batch.get(task.label_name)
    if labels is None or not labels.ndim or len(labels) != count:
        requirement = f"a batch whose {task.label_name!r} has one element for each of {count} examples"
        raise _error(f"{type(task).__module__}:{type(task).__qualname__}.collate", batch, requirement)
    del batch[task.label_name]
    return labels.numpy()


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0)


def _checked(cls: type, name: str) -> Callable[..., Any]:
    """The method of a class, with a check of what it returns."""
    method, require = vars(cls)[name], _REQUIREMENTS[name]
    path = f"{cls.__module__}:{cls.__qualname__}.{name}"

    @functools.wraps(method)
    def checked(self: Any, *arguments: Any, **named: Any) -> Any:
        bound = method.__get__(self, type(self))
        value = bound(*arguments, **named)
        inputs = inspect.signature(bound).bind(*arguments, **named).args if named else arguments
        requirement = require(self, value, *inputs)
        if requirement is not None:
            raise _error(path, value, requirement)
        return value

    return checked


def _error(path: str, value: Any, requirement: str) -> UsageError:
    return UsageError(
        f"--task {path} returns {_describe(value)}; return {requirement}",
        code=ErrorCode.TASK_FAILED,
        field="task",
        value=path,
    )


def _describe(value: Any) -> str:
    """A returned value in a few words."""
    match value:
        case None:
            return "None"
        case Dataset():
            return f"{len(value)} rows with the columns {_listed(value.column_names)}"
        case np.ndarray() | Tensor():
            return f"values of type {value.dtype} and shape {list(value.shape)}"
        case Mapping():
            kinds = {
                key: list(item.shape) if isinstance(item, Tensor) else type(item).__name__
                for key, item in value.items()
            }
            shapes = [f"{key} {kind}" for key, kind in kinds.items()]
            return f"a {type(value).__name__} with {_listed(shapes)}"
        case str() | bytes():
            return f"text ({value!r:.40})"
        case Sized():
            return f"a {type(value).__name__} of length {len(value)}"
    return f"a value of type {type(value).__name__}"


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(name[:40] for name in names[:_LISTED])
    return (listed or "none") if len(names) <= _LISTED else f"{listed}, ..."


def _encoded_rows(task: Any, value: Any, rows: Sized, *arguments: Any) -> str | None:
    """Encoded rows; a task is free to encode several rows as one, or one as several."""
    if isinstance(value, Dataset) and "length" in value.column_names:
        lengths = value.with_format("arrow")["length"][:]
        is_whole = pa.types.is_integer(lengths.type) and not lengths.null_count
        if is_whole if len(value) else not len(rows):
            return None
    return "a datasets.Dataset with at least one row and a column 'length' of whole numbers"


def _encoded_labels(task: Any, value: Any, rows: Sized, *arguments: Any) -> str | None:
    valid = isinstance(value, Sized) and not isinstance(value, str | Mapping) and len(value) == len(rows)
    return None if valid else f"a list with one label for each of {len(rows)} rows"


def _batch(task: Any, value: Any, *arguments: Any) -> str | None:
    """A batch; `pop_labels` checks its labels where they are read."""
    are_tensors = isinstance(value, MutableMapping) and all(isinstance(tensor, Tensor) for tensor in value.values())
    if are_tensors and value.keys() - {task.label_name}:
        return None
    return f"a dict of tensors: the inputs of the model, and {task.label_name!r}"


def _statistics_of(task: Any, value: Any, _: Any, examples: Sized, *arguments: Any) -> str | None:
    """Statistics of the examples, or of their labels."""
    if _is_table(value) and len(value) == len(examples):
        return None
    return f"an array of numbers [examples, k], with one row for each of {len(examples)} examples"


def _statistics(task: Any, value: Any, *arguments: Any) -> str | None:
    return None if _is_table(value) else "an array of numbers [k, statistics]"


def _is_table(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind in "biuf"


def _answers_to(task: Any, value: Any, _: Any, examples: Sized, *arguments: Any) -> str | None:
    """Answers to the examples, or to those of their labels."""
    are_texts = (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(text, str) for text in value)
    )
    if are_texts and len(value) in (0, len(examples)):
        return None
    return f"a list with one text for each of {len(examples)} examples, or an empty one"


def _text(task: Any, value: Any, *arguments: Any) -> str | None:
    return None if isinstance(value, str) else "a text"


def _number(task: Any, value: Any, *arguments: Any) -> str | None:
    return None if _is_number(value) else "a number"


_REQUIREMENTS: Mapping[str, Requirement] = {
    "encode": _encoded_rows,
    "encode_unlabelled": _encoded_rows,
    "encode_labels": _encoded_labels,
    "locate": _encoded_rows,
    "collate": _batch,
    "measure": _statistics_of,
    "per_example": _statistics_of,
    "summarize": _statistics,
    "score": _number,
    "answers": _answers_to,
    "answer_texts": _answers_to,
    "reference_text": _text,
}
"""Name of a method -> what it has to return."""
