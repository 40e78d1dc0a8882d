"""Labels as numbers: one mapping for every split."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features
from transformers import BertConfig

from compressor.errors import ErrorCode
from compressor.tasks.labels import class_ids, classes_of, numbers_of
from tests.faults import fails_with

NAMES: dict[int, str] = {0: "entailment", 1: "neutral", 2: "contradiction"}


def rows_of(labels: list[Any], names: list[str] | None = None) -> Dataset:
    features = None if names is None else Features({"label": ClassLabel(names=names)})
    return Dataset.from_dict({"label": labels}, features=features)


def ids_of(labels: list[Any], **config: Any) -> dict[str, int]:
    return class_ids(rows_of(labels), "label", BertConfig(**config), "f")


@pytest.mark.parametrize("labels", [[1, 0], ["1", "0"], [1.0, 0.0], ["1.0", " 0 "], [True, False]])
def test_whole_numbers_are_classes(labels: list[Any]) -> None:
    assert classes_of(rows_of(labels), "label", ids_of(labels, num_labels=2), BertConfig(), "f") == [1, 0]


def test_names_of_the_model_are_its_classes() -> None:
    ids = ids_of(["Neutral", "contradiction"], id2label=NAMES)
    assert (ids["Neutral"], ids["contradiction"], ids["entailment"]) == (1, 2, 0)


@pytest.mark.parametrize(
    ("names", "labels", "expected"),
    [
        ({0: "1", 1: "2", 2: "3"}, ["1", "3", "2"], [0, 2, 1]),
        ({0: "1", 1: "0"}, [0, 1], [1, 0]),
        ({0: "01", 1: "02"}, ["01", "02"], [0, 1]),
        ({0: "1", 1: "2", 2: "3"}, [0, 2], [0, 2]),
        ({0: "A", 1: "a", 2: "B", 3: "b"}, ["A", "a", "B", "b"], [0, 1, 2, 3]),
        ({0: "1_1", 1: "11"}, ["1_1", "11"], [0, 1]),
    ],
)
def test_numbers_are_names_of_classes_where_the_model_has_these_names(
    names: dict[int, str], labels: list[Any], expected: list[int]
) -> None:
    assert classes_of(rows_of(labels), "label", ids_of(labels, id2label=names), BertConfig(), "f") == expected


def test_new_names_are_numbered_in_order_for_every_split() -> None:
    two_classes: dict[str, Any] = {"num_labels": 2}
    config = BertConfig(**two_classes)
    ids = class_ids(rows_of(["pos", "neg", "pos"]), "label", config, "f")
    assert ids == {"neg": 0, "pos": 1}
    assert config.id2label == {0: "neg", 1: "pos"}
    assert classes_of(rows_of(["pos"]), "label", ids, config, "dev") == [1]


def test_every_split_may_spell_names_in_its_own_case() -> None:
    config = BertConfig(id2label={0: "neg", 1: "pos"})
    ids = class_ids(rows_of(["NEG", "POS"]), "label", config, "train")
    assert classes_of(rows_of(["Neg", "Pos", "neg"]), "label", ids, config, "test") == [0, 1, 0]
    assert classes_of(rows_of(["x", "X"]), "label", {"x": 0, "X": 1}, config, "test") == [0, 1]
    with fails_with(ErrorCode.LABEL_MISMATCH, row=1, value="Xx"):  # which of the two is not known
        classes_of(rows_of(["Xx"]), "label", {"xx": 0, "XX": 1}, config, "test")


def test_a_split_may_lack_a_class_of_the_model() -> None:
    ids = ids_of([0, 1], num_labels=3)
    assert classes_of(rows_of([2]), "label", ids, BertConfig(), "dev") == [2]


def test_data_sets_may_number_the_same_names_in_different_orders() -> None:
    config = BertConfig(id2label={0: "no", 1: "yes"})
    ids = class_ids(rows_of([0, 1], names=["no", "yes"]), "label", config, "train")
    assert classes_of(rows_of([0, 0, 1], names=["yes", "no"]), "label", ids, config, "test") == [1, 1, 0]
    assert classes_of(rows_of(["no", "yes"]), "label", ids, config, "test") == [0, 1]
    texts = class_ids(rows_of(["yes", "no"]), "label", config, "train")
    assert classes_of(rows_of([0, 1], names=["yes", "no"]), "label", texts, config, "test") == [1, 0]


def test_numbers_of_a_data_set_are_read_by_their_names_if_the_model_has_them() -> None:
    rows = rows_of([0, 1], names=["contradiction", "entailment"])
    for config, expected in ((BertConfig(id2label=NAMES), [2, 0]), (BertConfig(), [0, 1])):
        assert classes_of(rows, "label", class_ids(rows, "label", config, "f"), config, "f") == expected


@pytest.mark.parametrize(
    ("labels", "config", "code", "details"),
    [
        ([1, 1], {"num_labels": 2}, ErrorCode.INVALID_ROWS, {"value": "1"}),
        ([1, 2], {"num_labels": 2}, ErrorCode.LABEL_MISMATCH, {"row": 2, "value": "2", "classes": 2}),
        ([-1, 0], {"num_labels": 2}, ErrorCode.LABEL_MISMATCH, {"row": 1, "value": "-1", "classes": 2}),
        (
            ["a", "b", "a", "B", "b", "a"],
            {"num_labels": 2},
            ErrorCode.LABEL_MISMATCH,
            {"labels": ("B", "a", "b"), "classes": 2, "row": 4, "value": "B", "count": 1},
        ),
        (["c", "b", "a"], {"num_labels": 2}, ErrorCode.LABEL_MISMATCH, {"row": 1, "value": "c"}),
        (["a", "b"], {"num_labels": 3}, ErrorCode.LABEL_MISMATCH, {"labels": ("a", "b"), "classes": 3}),
        (["neutral", "meh", "bah"], {"id2label": NAMES}, ErrorCode.LABEL_MISMATCH, {"row": 2, "value": "meh"}),
        (["a", None], {"num_labels": 2}, ErrorCode.INVALID_ROWS, {"row": 2, "value": None}),
        (["a", " "], {"num_labels": 2}, ErrorCode.INVALID_ROWS, {"row": 2, "value": " "}),
        ([[1], [0]], {"num_labels": 2}, ErrorCode.INVALID_ROWS, {"row": 1, "value": [1]}),
    ],
)
def test_faults_of_labels(labels: list[Any], config: dict[str, Any], code: ErrorCode, details: dict[str, Any]) -> None:
    with fails_with(code, column="label", **details) as caught:
        ids_of(labels, **config)
    row = details.get("row")
    assert caught.value.details.get("row") == row
    assert row is None or f"row {row}" in str(caught.value)
    assert "'label'" in str(caught.value)


def test_a_label_that_training_rows_lack_is_refused() -> None:
    ids = ids_of(["pos", "neg"], num_labels=2)
    with fails_with(ErrorCode.LABEL_MISMATCH, value="meh", labels=("neg", "pos")):
        classes_of(rows_of(["meh"]), "label", ids, BertConfig(), "dev")


def test_withheld_labels_are_refused() -> None:
    with fails_with(ErrorCode.INVALID_ROWS, column="label", value=-1):
        classes_of(rows_of([-1, -1], names=["no", "yes"]), "label", {"0": 0, "1": 1}, BertConfig(), "f")


def test_a_row_without_a_label_is_named() -> None:
    with fails_with(ErrorCode.INVALID_ROWS, column="label", row=2, value=-1):
        classes_of(rows_of([0, -1, 1], names=["no", "yes"]), "label", {"0": 0, "1": 1}, BertConfig(), "f")


def test_labels_of_a_regression_are_numbers() -> None:
    assert numbers_of(rows_of(["3.80", "5", "-1e-3"]), "label", "f") == [3.8, 5.0, -0.001]


@pytest.mark.parametrize("text", ["high", "nan", "inf", "0_5"])
def test_labels_that_are_not_finite_numbers_are_refused(text: str) -> None:
    with fails_with(ErrorCode.INVALID_ROWS, column="label", row=1, value=text):
        numbers_of(rows_of([text]), "label", "f")
