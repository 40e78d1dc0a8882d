"""The labels of rows as text or numbers, as they are in their column."""

from __future__ import annotations

import math
from typing import Any

from datasets import ClassLabel, Dataset, Value

from compressor.errors import ErrorCode, InputError, RowError
from compressor.tasks.decimal_commas import with_points

_NUMBER_COLUMNS = ("label", "labels", "score", "similarity", "similarity_score")
"""Usual names of columns whose labels are numbers."""


def numbers_of(rows: Dataset, column: str, source: str) -> list[float]:
    """The label of every row as a finite number.

    Raises:
        InputError: a label is not a finite number.
    """
    values = []
    for row, text in enumerate(with_points(label_texts(rows, column, source)), 1):
        value = number_of(text)
        if not math.isfinite(value):
            problem = f"{column!r} is {text!r}, which is not a finite number; correct it"
            raise RowError.of(source, row, problem, column=column, value=text)
        values.append(value)
    return values


def label_texts(rows: Dataset, column: str, source: str) -> list[str]:
    """Every label as text; `1`, `"1"` and `1.0` are the same label.

    Raises:
        InputError: a label is missing, withheld, or a list or an object.
    """
    feature = rows.features[column]
    texts = []
    for row, value in enumerate(rows[column][:], 1):
        text = label_text(value)
        if text is None:
            problem = f"no usable {column!r} ({value!r:.40}); correct it or remove the row"
            raise RowError.of(source, row, problem, column=column, value=value)
        texts.append(text)
    if isinstance(feature, ClassLabel) and "-1" in texts:
        if set(texts) != {"-1"}:
            problem = f"{column!r} is -1, which stands for no label; remove the row"
            raise RowError.of(source, texts.index("-1") + 1, problem, column=column, value=-1)
        raise InputError(
            f"{source}: the labels are withheld (-1); use a split that has labels",
            code=ErrorCode.INVALID_ROWS,
            column=column,
            value=-1,
        )
    return texts


def are_withheld(rows: Dataset) -> bool:
    """Whether every row of a column of labels is -1, as in the test rows of public benchmarks.

    Columns of labels are those of the type `ClassLabel`, and those of numbers or texts with a usual name.
    """
    columns = [
        name
        for name, feature in rows.features.items()
        if isinstance(feature, ClassLabel) or (name in _NUMBER_COLUMNS and _is_number_or_text(feature))
    ]
    return any(len(rows) > 0 and all(label_text(value) == "-1" for value in rows[name][:]) for name in columns)


def _is_number_or_text(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype.startswith(("int", "float", "string", "large_string"))


def label_text(value: Any) -> str | None:
    """A label as text; None if it is empty or neither a number nor text."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, (int, float)):
        whole = whole_number(str(value))
        return str(value if whole is None else whole)
    if isinstance(value, str) and value.strip():
        whole = whole_number(value.strip())
        return value.strip() if whole is None else str(whole)
    return None


def whole_number(text: str) -> int | None:
    """The number of a text such as `3` or `3.0`; None for any other text."""
    number = number_of(text)
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) < 2**53 else None


def number_of(text: str) -> float:
    """The number of a text; NaN for any other text, such as `1_000`, which Python takes for a number."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan
