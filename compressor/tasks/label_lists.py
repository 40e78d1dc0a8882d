"""Rows with several labels: lists in one column, names joined in a text, or one column for each class."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from typing import Any

from datasets import ClassLabel, Dataset
from transformers import PretrainedConfig

from compressor.errors import ErrorCode, InputError, RowError
from compressor.models.classifiers import class_names, has_default_names
from compressor.tasks.columns import check_present, is_text, list_columns
from compressor.tasks.labels import has_model_names, label_text, number_of, numbers_of

_SEPARATORS = ("|", ";", ",")
"""What joins the labels of a text."""


def columns_of_classes(
    rows: Dataset, requested: str | None, config: PretrainedConfig, source: str
) -> tuple[str, ...] | None:
    """The columns with one number for each class, in the order of the classes; None: one column holds all labels.

    1. A list of columns, `toxic,insult`, is requested. Its order is that of the classes where the model has no names
       for them.
    2. No column is requested, and there are columns with the names of all classes, ignoring case.

    Args:
        rows: the rows of one split.
        requested: the value of `--label-column`.
        config: configuration of the model, with the number of its outputs and their names.
        source: name of the rows in error messages.

    Raises:
        InputError: a requested column is missing, or they are not one for each class.
    """
    classes = int(config.num_labels or 0)
    names = class_names(config)
    if requested is None:
        return None if has_default_names(config) else _columns_by_name(names, rows.column_names)
    if requested in rows.column_names or "," not in requested:
        return None
    columns = [column.strip() for column in requested.split(",")]
    for column in columns:
        check_present(rows, column, source, "label_column")
    ordered = tuple(columns) if has_default_names(config) else _columns_by_name(names, columns)
    if ordered is None or len(set(columns)) != classes or len(columns) != classes:
        raise InputError(
            f"{source}: --label-column {requested}: the model has the {classes} outputs {', '.join(names)}; name one"
            " column for each, by these names",
            code=ErrorCode.LABEL_MISMATCH,
            field="label_column",
            columns=tuple(columns),
            classes=classes,
        )
    return ordered


def _columns_by_name(names: Sequence[str], columns: Sequence[str]) -> tuple[str, ...] | None:
    """The columns with these names, ignoring case; None where one is missing."""
    spelled = {column.lower(): column for column in columns}
    return tuple(spelled[name.lower()] for name in names) if all(name.lower() in spelled for name in names) else None


def numbers_by_column(rows: Dataset, columns: Sequence[str], source: str) -> list[list[float]]:
    """The numbers of some columns, one list for each row.

    Raises:
        InputError: a value is not a finite number.
    """
    return [list(row) for row in zip(*(numbers_of(rows, column, source) for column in columns), strict=True)]


def label_lists(rows: Dataset, column: str, config: PretrainedConfig, source: str) -> list[list[str]]:
    """The labels of every row as text, in the form of `labels.label_text`.

    A value is one of these:

    1. A list, or a single number.
    2. A text that is a list in brackets, as tables hold them: `[0, 1]`, `['a', 'b']`.
    3. A text that joins labels by the first of `|`, `;`, `,` and spaces with which all are names of classes or numbers;
       else by the first that occurs. A text without labels is empty.

    Raises:
        InputError: a row has no such value.
    """
    feature, values = rows.features[column], rows[column][:]
    if is_text(rows, column):
        names = {str(name).strip().lower() for name in (config.id2label or {}).values()}
        return _split_texts(["" if text is None else text.strip() for text in values], names)
    inner = getattr(feature, "feature", feature)
    lists = []
    for row, value in enumerate(values, 1):
        texts = [label_text(item) for item in (value if isinstance(value, list) else [value])]
        if None in texts:
            problem = f"no usable {column!r} ({value!r:.40}); correct it or remove the row"
            raise RowError.of(source, row, problem, column=column, value=value)
        lists.append([text for text in texts if text is not None])
    if isinstance(inner, ClassLabel) and has_model_names(inner, config):  # data sets number them in their own order
        return [[inner.names[int(text)] for text in texts] for texts in lists]
    return lists


def _split_texts(texts: Sequence[str], names: set[str]) -> list[list[str]]:
    """The labels that each text holds."""
    inside = [text.removeprefix("[").removesuffix("]") if _is_bracketed(text) else text for text in texts]

    def is_known(text: str) -> bool:
        return text.lower() in names or not math.isnan(number_of(text))

    splits: list[Callable[[str], list[str]]] = [lambda text: [text]]
    splits += [lambda text, mark=mark: text.split(mark) for mark in _SEPARATORS]  # type: ignore[misc]
    splits.append(str.split)
    parsed = [_literal(text) for text in texts]
    if all(items is not None for items in parsed):
        return [[text for item in items or () if (text := label_text(item)) is not None] for items in parsed]
    for split in splits:
        lists = [_labels(split(text)) for text in inside]
        if all(is_known(text) for labels in lists for text in labels):
            return lists
    mark = next((mark for mark in _SEPARATORS if any(mark in text for text in inside)), None)
    return [_labels(text.split(mark) if mark else [text]) for text in inside]


def _labels(parts: Sequence[str]) -> list[str]:
    """The labels among the parts of a text, without white space around them."""
    return [text for part in parts if (text := label_text(part)) is not None]


def _is_bracketed(text: str) -> bool:
    return text.startswith("[") and text.endswith("]")


def _literal(text: str) -> list[Any] | None:
    """The list that a text in brackets is, empty for an empty text; None for any other text."""
    if not text:
        return []
    if not _is_bracketed(text):
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, list) and all(label_text(item) is not None for item in value) else None


def are_vectors(lists: Sequence[Sequence[str]], classes: int) -> bool:
    """Whether lists hold one number from 0 to 1 for each class, and are not lists of class numbers or names."""
    return all(len(texts) == classes and all(0 <= number_of(text) <= 1 for text in texts) for texts in lists)


def number_lists(rows: Dataset, column: str, config: PretrainedConfig, source: str) -> list[list[float]]:
    """One finite number for each output of a model, for every row.

    Raises:
        InputError: a row has another number of them.
    """
    count, lists = int(config.num_labels or 0), label_lists(rows, column, config, source)
    for row, texts in enumerate(lists, 1):
        if len(texts) != count or not all(math.isfinite(number_of(text)) for text in texts):
            problem = (
                f"{column!r} is {', '.join(texts) or 'empty':.60}, and the model has {count} outputs; give a list of"
                " as many numbers, name a column for each (--label-column), or name another task (--task)"
            )
            raise RowError.of(source, row, problem, column=column, value=tuple(texts), count=count)
    return [[number_of(text) for text in texts] for texts in lists]


def no_columns(rows: Dataset, config: PretrainedConfig, source: str) -> InputError:
    """The error of rows without labels of several classes or values."""
    names = ", ".join(class_names(config))
    return InputError(
        f"{source}: no column of labels among {list_columns(rows)}; add 'labels' with a list for each row, or a column"
        f" for each output ({names:.120}), or name the columns (--label-column)",
        code=ErrorCode.COLUMN_MISSING,
        field="label_column",
        columns=tuple(rows.column_names),
    )
