"""Read labels of rows as text, numbers and lists, and map them to classes of a model, alike in all splits of a run."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datasets import ClassLabel, Dataset, Value

from compressor.answers import class_names, has_default_names
from compressor.errors import ErrorCode, InputError, RowError
from compressor.tasks.columns import check_present, is_text, list_columns
from graph_passes.errors import listed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NUMBER = re.compile(r"[+-]?\d+(?:,(\d+))?")
_THOUSANDS = 3  # digits after a comma that may separate thousands
_NUMBER_COLUMNS = ("label", "labels", "score", "similarity", "similarity_score")
"""Usual names of columns whose labels are numbers."""
_LABEL_TYPES = ("int", "float", "string", "large_string")
_LISTED = 6  # maximum number of labels that an error message lists
_SEPARATORS = ("|", ";", ",")  # separators of the labels in a text


def with_points(texts: Sequence[str]) -> list[str]:
    """Replace decimal commas of numbers by points.

    Commas are decimal if every text is a number with at most one comma, and not all commas precede three digits, as
    commas between thousands do; otherwise the texts are returned as they are.
    """
    matches = [_NUMBER.fullmatch(text) for text in texts]
    decimals = {len(match.group(1)) for match in matches if match is not None and match.group(1)}
    if None in matches or decimals <= {_THOUSANDS}:
        return list(texts)
    return [text.replace(",", ".") for text in texts]


def numbers_of(rows: Dataset, column: str, source: str) -> list[float]:
    """The label of every row as a finite number; raise InputError for another label."""
    values = []
    for row, text in enumerate(with_points(_label_texts(rows, column, source)), 1):
        value = number_of(text)
        if not math.isfinite(value):
            problem = f"{column!r} is {text!r}, which is not a finite number; correct it"
            raise RowError.of(source, row, problem, column=column, value=text)
        values.append(value)
    return values


def _label_texts(rows: Dataset, column: str, source: str) -> list[str]:
    """Every label as `label_text`; raise InputError for a label that is missing, withheld, a list or an object."""
    texts = [_usable(value, column, value, row, source) for row, value in enumerate(rows[column][:], 1)]
    if isinstance(rows.features[column], ClassLabel) and "-1" in texts:
        if set(texts) != {"-1"}:
            problem = f"{column!r} is -1, which stands for no label; remove the row"
            raise RowError.of(source, texts.index("-1") + 1, problem, column=column, value=-1)
        text = f"{source}: the labels are withheld (-1); use a split that has labels"
        raise InputError(text, code=ErrorCode.INVALID_ROWS, column=column, value=-1)
    return texts


def _usable(label: Any, column: str, cell: Any, row: int, source: str) -> str:
    """A label of the cell of a row as `label_text`; raise RowError where it has none."""
    if (text := label_text(label)) is None:
        problem = f"no usable {column!r} ({cell!r:.40}); correct it or remove the row"
        raise RowError.of(source, row, problem, column=column, value=cell)
    return text


def are_withheld(rows: Dataset) -> bool:
    """Whether every row of a column of labels is -1, as in the test rows of public benchmarks.

    Columns of labels are those of the type `ClassLabel`, and those of numbers or texts with a usual name.
    """

    def holds_labels(name: str, feature: Any) -> bool:
        is_usual = name in _NUMBER_COLUMNS and isinstance(feature, Value) and feature.dtype.startswith(_LABEL_TYPES)
        return is_usual or isinstance(feature, ClassLabel)

    columns = [rows[name][:] for name, feature in rows.features.items() if holds_labels(name, feature)]
    return any(len(rows) > 0 and all(label_text(value) == "-1" for value in column) for column in columns)


def label_text(value: Any) -> str | None:
    """A label as text, the same for `1`, `"1"` and `1.0`; None if it is empty, or neither a number nor text."""
    if isinstance(value, bool):
        return str(int(value))
    text = str(value).strip() if isinstance(value, (int, float, str)) else ""
    if not text or (isinstance(value, float) and math.isnan(value)):
        return None
    whole = whole_number(text)
    return text if whole is None else str(whole)


def whole_number(text: str) -> int | None:
    """The number of a text such as `3` or `3.0`, else None."""
    number = number_of(text)
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) < 2**53 else None


def number_of(text: str) -> float:
    """The number of a text, else NaN, also for `1_000`, which Python reads as a number."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True)
class RowLabels:
    """Labels as text; a row may have any number of them.

    Attributes:
        texts: the labels of all rows.
        rows: the number of the row of each label, counted from 1.
        column: the column of labels.
        source: name of the rows in error messages.
    """

    texts: Sequence[str]
    rows: Sequence[int]
    column: str
    source: str

    @classmethod
    def of(cls, lists: Sequence[Sequence[str]], column: str, source: str) -> RowLabels:
        """The labels of a list for each row."""
        rows = [row for row, labels in enumerate(lists, 1) for _ in labels]
        return cls([text for labels in lists for text in labels], rows, column, source)

    def ids(self, config: PretrainedConfig, known: Sequence[str] | None = None) -> dict[str, int]:
        """Map labels to classes by the rules of `class_ids`; rule 1 compares all `known` names with the model's.

        Raises:
            InputError: a label is outside the model's classes, or only some labels are names of the model's classes.
        """
        classes, names = int(config.num_labels or 0), sorted(set(self.texts))
        if not _names_unknown_to(config, known or names):
            ids = {_class_name(name): int(index) for index, name in (config.id2label or {}).items()}
            lower_case = {name.lower(): index for name, index in ids.items()}
            spelled = {name: _class_name(name) for name in known or names}
            ids |= {name: ids.get(text, lower_case[text.lower()]) for name, text in spelled.items()}
        elif all(whole_number(name) is not None for name in names):
            ids = {str(index): index for index in range(classes)} | {name: int(float(name)) for name in names}
        else:
            self._check_new_names(names, config)
            ids = {name: index for index, name in enumerate(names)}
            config.id2label, config.label2id = dict(enumerate(names)), dict(ids)  # later runs map their labels by them
        for name in (name for name in names if not 0 <= ids[name] < classes):
            problem = (
                f"{name}, outside the model's range 0 to {classes - 1}; number the labels from 0, or use a model with"
                " more classes"
            )
            raise self._error(name, problem, classes=classes)
        return ids

    def classes(self, ids: Mapping[str, int]) -> list[int]:
        """The class of every label by `ids`, ignoring case if a single class is spelled so.

        Raises:
            InputError: `ids` lacks a label.
        """
        spelled: dict[str, set[int]] = {}
        for name, number in ids.items():
            spelled.setdefault(name.lower(), set()).add(number)
        classes: list[int] = []
        for text in self.texts:
            numbers = {ids[text]} if text in ids else spelled.get(text.lower(), set())
            if len(numbers) != 1:
                problem = f"{text!r}, which is not one of {listed_names(ids)}; correct it, or remove rows with it"
                raise self._error(text, problem, labels=tuple(ids))
            classes += numbers
        return classes

    def _check_new_names(self, names: Sequence[str], config: PretrainedConfig) -> None:
        """Raise InputError unless new names are as many as classes, and none of them is already the name of a class."""
        classes, unknown = int(config.num_labels or 0), _names_unknown_to(config, names)
        details: dict[str, Any] = {"labels": tuple(names), "classes": classes}
        if 0 < len(unknown) < len(names):
            text = next(text for text in self.texts if text in unknown)
            problem = (
                f"{text!r:.60}, which is not among the model's labels"
                f" ({listed_names((config.id2label or {}).values())}, id2label in its config.json); correct the"
                " label or remove its rows"
            )
            raise self._error(text, problem, **details)
        if len(names) > classes:
            rarest, count = min(Counter(self.texts).items(), key=lambda item: item[1])
            problem = (
                f"{rarest!r:.60}, the rarest label, in {count} of {len(self.texts)} labels; there are {len(names)}"
                f" different labels ({listed_names(names)}), and the model has {classes} classes: correct the label, "
                f"fine-tune a model with {len(names)} classes, or name another column (--label-column)"
            )
            raise self._error(rarest, problem, count=count, **details)
        if len(names) < classes:
            text = (
                f"{self.source}: {self.column!r} has {len(names)} different labels ({listed_names(names)}), the model"
                f" has {classes} classes without these names; put id2label into its config.json, or number the labels"
            )
            raise InputError(text, code=ErrorCode.LABEL_MISMATCH, column=self.column, **details)

    def _error(self, text: str, problem: str, **details: Any) -> RowError:
        row, details = self.rows[self.texts.index(text)], {"column": self.column, "value": text, **details}
        return RowError.of(self.source, row, f"{self.column!r} is {problem}", code=ErrorCode.LABEL_MISMATCH, **details)


def class_ids(rows: Dataset, column: str, config: PretrainedConfig, source: str) -> dict[str, int]:
    """Map each label, as text, to a class of the model.

    The first rule that applies decides:

    1. Labels that are names in `config.id2label`, ignoring case, are those classes, even if names are numbers (`1` to
       `5` stars); a `ClassLabel` column is mapped by the names of its numbers.
    2. Other whole numbers are class indices.
    3. Other names are numbered in sorted order, and written into the configuration of the model.

    Raises:
        InputError: a label is empty or outside the model's classes, only some labels are names of the model's classes,
            or all rows have the same label.
    """
    labels, feature = _labels_of(rows, column, config, source), rows.features[column]
    if len(set(labels.texts)) < 2:
        text = (
            f"{source}: {column!r} is {labels.texts[0]!r} in every row; give rows of two classes or more, or"
            " remove the column where labels are not needed"
        )
        raise InputError(text, code=ErrorCode.INVALID_ROWS, column=column, value=labels.texts[0])
    return labels.ids(config, feature.names if has_model_names(feature, config) else None)


def classes_of(rows: Dataset, column: str, ids: Mapping[str, int], config: PretrainedConfig, source: str) -> list[int]:
    """The class of every row by `ids` of `class_ids`; raise InputError for a label that `ids` lacks."""
    return _labels_of(rows, column, config, source).classes(ids)


def _labels_of(rows: Dataset, column: str, config: PretrainedConfig, source: str) -> RowLabels:
    """The label of every row; the names of numbers if a `ClassLabel` column has names of the model's classes."""
    texts, feature = _label_texts(rows, column, source), rows.features[column]
    if has_model_names(feature, config):  # data sets number the same names in different orders
        texts = [feature.names[int(text)] for text in texts]
    return RowLabels(texts, range(1, len(texts) + 1), column, source)


def has_model_names(feature: Any, config: PretrainedConfig) -> bool:
    """Whether a column is a `ClassLabel` whose names are all classes of the model."""
    return isinstance(feature, ClassLabel) and not _names_unknown_to(config, feature.names)


def _names_unknown_to(config: PretrainedConfig, names: Sequence[str]) -> list[str]:
    """The names that are not in `config.id2label`, ignoring case."""
    model_names = {_class_name(name).lower() for name in (config.id2label or {}).values()}
    return [name for name in names if _class_name(name).lower() not in model_names]


def _class_name(name: Any) -> str:
    """The name of a class of a model in the spelling of `label_text`: `1` for `01`."""
    return label_text(str(name)) or str(name)


def listed_names(names: Iterable[str]) -> str:
    """The first names, each truncated, for an error message."""
    return listed((str(name)[:40] for name in names), _LISTED)


def columns_of_classes(
    rows: Dataset, requested: str | None, config: PretrainedConfig, source: str
) -> tuple[str, ...] | None:
    """The columns with a number for each class, in the order of the classes; None: a single column holds all labels.

    1. The recipe names a list of columns, `toxic,insult`, in the order of the classes if the model has no names for
       them.
    2. The recipe names no column, and there are columns with the names of all classes, ignoring case.

    Raises:
        InputError: a named column is missing, or there is not a column for each class.
    """
    names = class_names(config)
    if requested is None:
        return None if has_default_names(config) else _columns_by_name(names, rows.column_names)
    if requested in rows.column_names or "," not in requested:
        return None
    columns = [column.strip() for column in requested.split(",")]
    for column in columns:
        check_present(rows, column, source, "label_column")
    ordered = tuple(columns) if has_default_names(config) else _columns_by_name(names, columns)
    if ordered is None or not len(set(columns)) == len(columns) == len(names):
        text = (
            f"{source}: --label-column {requested}: the model has the {len(names)} outputs {', '.join(names)}; name one"
            " column for each, by these names"
        )
        details = {"field": "label_column", "columns": tuple(columns), "classes": len(names)}
        raise InputError(text, code=ErrorCode.LABEL_MISMATCH, **details)
    return ordered


def _columns_by_name(names: Sequence[str], columns: Sequence[str]) -> tuple[str, ...] | None:
    spelled = {column.lower(): column for column in columns}
    return tuple(spelled[name.lower()] for name in names) if all(name.lower() in spelled for name in names) else None


def numbers_by_column(rows: Dataset, columns: Sequence[str], source: str) -> list[list[float]]:
    """A list of the columns' numbers for each row; raise InputError for another value than a finite number."""
    return [list(row) for row in zip(*(numbers_of(rows, column, source) for column in columns), strict=True)]


def label_lists(rows: Dataset, column: str, config: PretrainedConfig, source: str) -> list[list[str]]:
    """The labels of every row as `label_text`.

    A value is one of these:

    1. A list, or a single number.
    2. A text that is a list in brackets, as in tables: `[0, 1]`, `['a', 'b']`.
    3. A text that joins labels by the first of `|`, `;`, `,` and spaces that separates names of classes or numbers,
       else by the first that occurs. A text without labels is empty.

    Raises:
        InputError: a row has another value.
    """
    feature, values = rows.features[column], rows[column][:]
    if is_text(rows, column):
        names = {str(name).strip().lower() for name in (config.id2label or {}).values()}
        return _split_texts(["" if text is None else text.strip() for text in values], names)
    inner = getattr(feature, "feature", feature)
    lists = [
        [_usable(item, column, value, row, source) for item in (value if isinstance(value, list) else [value])]
        for row, value in enumerate(values, 1)
    ]
    if has_model_names(inner, config):  # data sets number the same names in different orders
        return [[inner.names[int(text)] for text in texts] for texts in lists]
    return lists


def _split_texts(texts: Sequence[str], names: set[str]) -> list[list[str]]:
    inside = [text.removeprefix("[").removesuffix("]") if _is_bracketed(text) else text for text in texts]

    def is_known(text: str) -> bool:
        return text.lower() in names or not math.isnan(number_of(text))

    def labels(parts: Sequence[Any]) -> list[str]:
        return [text for part in parts if (text := label_text(part)) is not None]

    def split(mark: str | None) -> list[list[str]]:
        return [labels(text.split(mark) if mark != "" else [text]) for text in inside]

    parsed = [_literal(text) for text in texts]
    if all(items is not None for items in parsed):
        return [labels(items or ()) for items in parsed]
    for mark in ("", *_SEPARATORS, None):  # a single label; None: any space
        lists = split(mark)
        if all(is_known(text) for of_row in lists for text in of_row):
            return lists
    return split(next((mark for mark in _SEPARATORS if any(mark in text for text in inside)), ""))


def _is_bracketed(text: str) -> bool:
    return text.startswith("[") and text.endswith("]")


def _literal(text: str) -> list[Any] | None:
    """The list of a text in brackets, empty for an empty text; None for another text."""
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
    """Whether lists hold a number from 0 to 1 for each class, rather than numbers or names of classes."""
    return all(len(texts) == classes and all(0 <= number_of(text) <= 1 for text in texts) for texts in lists)


def number_lists(rows: Dataset, column: str, config: PretrainedConfig, source: str) -> list[list[float]]:
    """A finite number for each output of a model, for every row; raise InputError for other labels."""
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
    """The error of rows without columns of several labels."""
    text = (
        f"{source}: no column of labels among {list_columns(rows)}; add 'labels' with a list for each row, or a column"
        f" for each output ({', '.join(class_names(config)):.120}), or name the columns (--label-column)"
    )
    details = {"field": "label_column", "columns": tuple(rows.column_names)}
    return InputError(text, code=ErrorCode.COLUMN_MISSING, **details)
