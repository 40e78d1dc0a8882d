"""The configuration of a training: ranges, contradictions, and errors that name the flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compressor.config.request import Training
from compressor.errors import ErrorCode, UsageError
from tests.faults import fails_with


@pytest.mark.parametrize(
    ("flags", "code", "field"),
    [
        ({"hidden": "30"}, ErrorCode.CONTRADICTION, "hidden"),
        ({"layers": "0"}, ErrorCode.OUT_OF_RANGE, "layers"),
        ({"learning_rate": "1e-5"}, ErrorCode.CONTRADICTION, "final_learning_rate"),
        ({"level": "character", "vocabulary": "9"}, ErrorCode.CONTRADICTION, "vocabulary"),
        ({"optimizer": "sgd"}, ErrorCode.UNKNOWN_NAME, "optimizer"),
        ({"steps": "many"}, ErrorCode.INVALID_VALUE, "steps"),
        ({"warmup": "1.5"}, ErrorCode.OUT_OF_RANGE, "warmup"),
    ],
)
def test_a_fault_names_its_field(flags: dict[str, str], code: ErrorCode, field: str) -> None:
    with pytest.raises(UsageError) as error:
        Training(out="out", data="text.txt", **flags)
    assert (error.value.code, error.value.details["field"]) == (code, field)
    assert str(error.value).startswith(f"--{field.replace('_', '-')} ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("flags", "field"), [({"out": "out"}, "data"), ({"data": "text.txt"}, "out")])
def test_a_missing_value_is_named(flags: dict[str, Any], field: str) -> None:
    with fails_with(ErrorCode.MISSING_VALUE, UsageError, field=field):
        Training(**flags)


def test_messages() -> None:
    with pytest.raises(UsageError) as error:
        Training(out="out", data="text.txt", hidden="30")
    assert str(error.value) == "--hidden 30: must be even and divisible by --heads 8; choose another width"


def test_the_texts_are_rows_whose_length_is_a_segment() -> None:
    rows = Training(out="out", data="text.txt", eval_data="eval.txt", segment="7", text_columns="text").rows
    assert (rows.data, rows.eval_data, rows.test_data) == ("text.txt", "eval.txt", None)
    assert (rows.max_length, rows.text_columns) == (7, ("text",))


def test_values_are_read_from_flags() -> None:
    training = Training(out="out", data="text.txt", layers="3", learning_rate="1e-3", force=True)
    assert (training.out, training.layers, training.learning_rate, training.force) == (Path("out"), 3, 1e-3, True)
