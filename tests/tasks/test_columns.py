"""Columns of texts and labels: requested columns, or else columns with usual names."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset, Features, Value

from compressor.errors import ErrorCode
from compressor.results import NoteCode
from compressor.tasks.columns import LabelColumn, TextColumns, empty_text_notes
from tests.faults import fails_with


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("split", "label", "sentence"), ("sentence",)),
        (("domain", "text"), ("text",)),
        (("hypothesis", "premise"), ("premise", "hypothesis")),
        (("sentence2", "sentence1"), ("sentence1", "sentence2")),
        (("question", "sentence"), ("question", "sentence")),
    ],
)
def test_text_columns_are_recognized_by_name(names: tuple[str, ...], expected: tuple[str, ...]) -> None:
    rows = Dataset.from_dict({name: ["a"] for name in names})
    assert TextColumns().find(rows, (), "f") == expected


def test_requested_columns_take_precedence() -> None:
    rows = Dataset.from_dict({"text": ["a"], "left": ["b"], "right": ["c"], "label": [1], "gold": [0]})
    assert TextColumns().find(rows, ("right", "left"), "f") == ("right", "left")
    assert LabelColumn().find(rows, None, "f") == "label"
    assert LabelColumn().find(rows, "gold", "f") == "gold"


@pytest.mark.parametrize("width", ["string", "large_string"])
def test_text_of_any_width_is_text(width: str) -> None:
    rows = Dataset.from_dict({"text": ["a"]}, features=Features({"text": Value(width)}))
    assert TextColumns().find(rows, (), "f") == ("text",)


@pytest.mark.parametrize(
    ("columns", "requested", "code", "details"),
    [
        ({"a": ["x"]}, (), ErrorCode.COLUMN_MISSING, {"field": "text_columns", "columns": ("a",)}),
        ({"text": ["x"]}, ("body",), ErrorCode.COLUMN_MISSING, {"value": "body", "columns": ("text",)}),
        ({"text": [1]}, (), ErrorCode.INVALID_ROWS, {"column": "text"}),
        ({"text": ["x", None]}, (), ErrorCode.INVALID_ROWS, {"column": "text", "row": 2}),
        (
            {"a": ["x"], "b": ["x"], "c": ["x"]},
            ("a", "b", "c"),
            ErrorCode.INVALID_VALUE,
            {"field": "text_columns", "value": ("a", "b", "c")},
        ),
    ],
)
def test_faults_of_text_columns(
    columns: dict[str, list[Any]], requested: tuple[str, ...], code: ErrorCode, details: dict[str, Any]
) -> None:
    with fails_with(code, **details) as caught:
        TextColumns().find(Dataset.from_dict(columns), requested, "f")
    assert str(caught.value).startswith("f: ")


@pytest.mark.parametrize(
    ("counts", "example"), [((1,), "'the text'"), ((2,), "'the text,a title'"), ((1, 2), "'the text'")]
)
def test_the_longest_texts_are_proposed(counts: tuple[int, ...], example: str) -> None:
    rows = Dataset.from_dict({"my label": ["good"], "the text": ["a fine film"], "a title": ["Kes, 1969"], "n": [1]})
    with fails_with(ErrorCode.COLUMN_MISSING) as caught:
        TextColumns(counts=counts).find(rows, (), "f")
    assert f"--text-columns {example}" in str(caught.value)


def test_empty_texts_are_counted_by_column() -> None:
    rows = Dataset.from_dict({"a": ["x", "", " "], "b": ["y", "y", "y"], "c": ["", "z", "z"]})
    (note,) = empty_text_notes(rows, ("a", "b", "c"), "f")
    assert note.code is NoteCode.TEXTS_EMPTY
    assert "2 of 3 rows in 'a' and 1 of 3 rows in 'c'" in note.text
    assert not empty_text_notes(rows, ("b",), "f")


def test_empty_texts_are_refused_if_every_text_is_needed() -> None:
    rows = Dataset.from_dict({"text": ["x", " "]})
    assert TextColumns().find(rows, (), "f") == ("text",)
    with fails_with(ErrorCode.INVALID_ROWS, column="text", row=2):
        TextColumns(allows_empty=False).find(rows, (), "f")


def test_a_pair_of_the_same_column_is_refused() -> None:
    rows = Dataset.from_dict({"de": ["x"], "en": ["y"]})
    with fails_with(ErrorCode.INVALID_VALUE, field="text_columns", value=("de", "de")):
        TextColumns(counts=(2,)).find(rows, ("de", "de"), "f")


@pytest.mark.parametrize("requested", [None, "gold"])
def test_a_missing_label_column_is_refused(requested: str | None) -> None:
    rows = Dataset.from_dict({"text": ["a"], "sentiment": ["b"]})
    with fails_with(ErrorCode.COLUMN_MISSING, field="label_column", value=requested, columns=("text", "sentiment")):
        LabelColumn().find(rows, requested, "f")
