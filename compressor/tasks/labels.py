"""The labels of rows as text, as numbers, and as classes of a model, with one mapping for all splits of a run."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import ClassLabel, Dataset, Value
from transformers import PretrainedConfig

from compressor.errors import ErrorCode, InputError, RowError

_NUMBER = re.compile(r"[+-]?\d+(?:,(\d+))?")
_THOUSANDS = 3
"""Digits behind a comma that may separate thousands."""


def with_points(texts: Sequence[str]) -> list[str]:
    """Numbers as text with decimal points, if their commas are decimal ones; the same texts otherwise.

    Commas are decimal if every text is a number with a comma or without one, and not all commas are followed by three
    digits, as those between thousands are.
    """
    matches = [_NUMBER.fullmatch(text) for text in texts]
    decimals = {len(match.group(1)) for match in matches if match is not None and match.group(1)}
    if None in matches or decimals <= {_THOUSANDS}:
        return list(texts)
    return [text.replace(",", ".") for text in texts]


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


_LISTED = 6
"""Maximum number of labels that an error message lists."""


def class_ids(rows: Dataset, column: str, config: PretrainedConfig, source: str) -> dict[str, int]:
    """Map each label, as text, to a class of the model.

    The first rule that applies decides:

    1. Labels that are names in `config.id2label`, ignoring case, are those classes, also where names are numbers
       (`1` to `5` stars); a `ClassLabel` column is mapped by the names of its numbers.
    2. Other whole numbers are class indices.
    3. Other names are numbered in sorted order and written into the configuration.

    Args:
        rows: the rows of one split.
        column: the column of labels.
        config: configuration of the model; rule 3 sets its `id2label` and `label2id`.
        source: name of the rows in error messages.

    Raises:
        InputError: a label is empty or outside the model's classes, only some labels are names of the model's classes,
            or all rows have the same label.
    """
    texts = _texts_of(rows, column, config, source)
    names = sorted(set(texts))
    if len(names) < 2:
        raise InputError(
            f"{source}: {column!r} is {names[0]!r} in every row; give rows of two classes or more, or"
            " remove the column where labels are not needed",
            code=ErrorCode.INVALID_ROWS,
            column=column,
            value=names[0],
        )
    feature = rows.features[column]
    known = feature.names if has_model_names(feature, config) else names
    return ids_of_texts(texts, known, config, column, source)


def ids_of_texts(
    texts: Sequence[str],
    known: Sequence[str],
    config: PretrainedConfig,
    column: str,
    source: str,
    row_numbers: Sequence[int] | None = None,
) -> dict[str, int]:
    """Map labels to classes by the rules of `class_ids`.

    Args:
        texts: labels as text.
        known: all names of the column, which rule 1 compares with those of the model.
        config: configuration of the model; rule 3 sets its `id2label` and `label2id`.
        column: the column of labels.
        source: name of the rows in error messages.
        row_numbers: the row of each label, counted from 1; None: every row has one.

    Raises:
        InputError: a label is outside the model's classes, or only some are names of the model's classes.
    """
    classes, names = int(config.num_labels or 0), sorted(set(texts))
    if model_names := _model_ids(known, config):
        ids = model_names
    elif all(whole_number(name) is not None for name in names):
        ids = {str(index): index for index in range(classes)} | {name: int(float(name)) for name in names}
    else:
        _check_new_names(texts, column, config, source, row_numbers)
        ids = {name: index for index, name in enumerate(names)}
        config.id2label, config.label2id = dict(enumerate(names)), dict(ids)  # later runs map their labels by them
    outside = [name for name in names if not 0 <= ids[name] < classes]
    if outside:
        raise RowError.of(
            source,
            _row_of(texts, outside[0], row_numbers),
            f"{column!r} is {outside[0]}, outside the model's range 0 to {classes - 1}; number the labels from 0, or"
            " use a model with more classes",
            code=ErrorCode.LABEL_MISMATCH,
            column=column,
            value=outside[0],
            classes=classes,
        )
    return ids


def _row_of(texts: Sequence[str], text: str, row_numbers: Sequence[int] | None) -> int:
    """The row of the first label that is `text`, counted from 1."""
    index = texts.index(text)
    return index + 1 if row_numbers is None else row_numbers[index]


def _check_new_names(
    texts: Sequence[str], column: str, config: PretrainedConfig, source: str, row_numbers: Sequence[int] | None = None
) -> None:
    """Raise InputError unless there are as many new names as classes, and none of them is already a class name."""
    names = sorted(set(texts))
    classes = int(config.num_labels or 0)
    unknown = _names_unknown_to(config, names)
    details: dict[str, Any] = {
        "code": ErrorCode.LABEL_MISMATCH,
        "column": column,
        "labels": tuple(names),
        "classes": classes,
    }
    if 0 < len(unknown) < len(names):
        text = next(text for text in texts if text in unknown)
        raise RowError.of(
            source,
            _row_of(texts, text, row_numbers),
            f"{column!r} is {text!r:.60}, which is not among the model's labels"
            f" ({listed_names(list((config.id2label or {}).values()))}, id2label in its config.json); correct the label"
            " or remove its rows",
            value=text,
            **details,
        )
    if len(names) > classes:
        rarest, count = min(Counter(texts).items(), key=lambda item: item[1])  # of equally rare ones the first
        raise RowError.of(
            source,
            _row_of(texts, rarest, row_numbers),
            f"{column!r} is {rarest!r:.60}, the rarest label, in {count} of {len(texts)} labels; there are {len(names)}"
            f" different labels ({listed_names(names)}), and the model has {classes} classes: correct the label,"
            " fine-tune a model with that many, or name another column (--label-column)",
            value=rarest,
            count=count,
            **details,
        )
    if len(names) < classes:
        raise InputError(
            f"{source}: {column!r} has {len(names)} different labels ({listed_names(names)}), the model has {classes}"
            " classes without these names; put id2label into its config.json, or number the labels",
            **details,
        )


def classes_of(rows: Dataset, column: str, ids: Mapping[str, int], config: PretrainedConfig, source: str) -> list[int]:
    """The class of every row.

    Args:
        rows: the rows.
        column: the column of labels.
        ids: label as text to class, from `class_ids`.
        config: configuration of the model, from `class_ids` too.
        source: name of the rows in error messages.

    Raises:
        InputError: a label is missing from `ids`.
    """
    texts = _texts_of(rows, column, config, source)
    return classes_of_texts(texts, ids, column, source)


def classes_of_texts(
    texts: Sequence[str], ids: Mapping[str, int], column: str, source: str, row_numbers: Sequence[int] | None = None
) -> list[int]:
    """The class of every label.

    Args:
        texts: labels as text.
        ids: label as text to class.
        column: the column of labels.
        source: name of the rows in error messages.
        row_numbers: the row of each label, counted from 1; None: every row has one.

    Raises:
        InputError: a label is missing from `ids`.
    """
    classes = [_class_of(text, ids) for text in texts]
    for text, number in zip(texts, classes, strict=True):
        if number is None:
            raise RowError.of(
                source,
                _row_of(texts, text, row_numbers),
                f"{column!r} is {text!r}, which is not one of {listed_names(list(ids))}; correct it, or remove rows"
                " with this label",
                code=ErrorCode.LABEL_MISMATCH,
                column=column,
                value=text,
                labels=tuple(ids),
            )
    return [number for number in classes if number is not None]


def _class_of(text: str, ids: Mapping[str, int]) -> int | None:
    """The class of a label, ignoring case where only one class is spelled so; None if there is none."""
    if text in ids:
        return ids[text]
    same = {number for name, number in ids.items() if name.lower() == text.lower()}
    return same.pop() if len(same) == 1 else None


def _texts_of(rows: Dataset, column: str, config: PretrainedConfig, source: str) -> list[str]:
    """Every label as text: the name of its number, where a `ClassLabel` column has names of the model's classes.

    Data sets number the same names in different orders.
    """
    texts, feature = label_texts(rows, column, source), rows.features[column]
    return [feature.names[int(text)] for text in texts] if has_model_names(feature, config) else texts


def has_model_names(feature: Any, config: PretrainedConfig) -> bool:
    """Whether a column numbers names that are all classes of the model."""
    return isinstance(feature, ClassLabel) and not _names_unknown_to(config, feature.names)


def _model_ids(names: Sequence[str], config: PretrainedConfig) -> dict[str, int]:
    """Map names to classes by `config.id2label`, also in the spelling of `names`; empty if it lacks one of them."""
    exact = {_class_name(name): int(index) for index, name in (config.id2label or {}).items()}
    lower_case = {name.lower(): index for name, index in exact.items()}
    if _names_unknown_to(config, names):
        return {}
    spelled = {name: _class_name(name) for name in names}
    return exact | {name: exact.get(text, lower_case[text.lower()]) for name, text in spelled.items()}


def _names_unknown_to(config: PretrainedConfig, names: Sequence[str]) -> list[str]:
    """The names that are not in `config.id2label`, ignoring case."""
    model_names = {_class_name(name).lower() for name in (config.id2label or {}).values()}
    return [name for name in names if _class_name(name).lower() not in model_names]


def _class_name(name: Any) -> str:
    """The name of a class of a model, spelled as labels are: `1` for `01`."""
    return label_text(str(name)) or str(name)


def listed_names(names: Sequence[str]) -> str:
    """The first names, each truncated, for an error message."""
    listed = ", ".join(str(name)[:40] for name in names[:_LISTED])
    return listed if len(names) <= _LISTED else f"{listed}, ..."
