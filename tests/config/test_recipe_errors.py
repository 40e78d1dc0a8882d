"""Errors of recipes: a fault in a flag, a key or a file is one line with a code, which names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.config.fields import flag_of
from compressor.config.recipe_file import read_recipe, recipe_of
from compressor.config.run import Recipe
from compressor.errors import ErrorCode, UsageError
from tests.faults import fails_with


def refused(model: str | None, file: str | None, flags: Mapping[str, Any]) -> UsageError:
    """The error of a recipe that is refused; its message is one line."""
    with pytest.raises(UsageError) as caught:
        recipe_of(model, file, flags)
    assert "\n" not in str(caught.value)
    return caught.value


def test_keys_in_the_table_of_another_section_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "compress.toml"
    file.write_text("[rows]\nkeep = 36\n")
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="keep", path=file):
        read_recipe(file)


def test_a_mistyped_section_is_named(tmp_path: Path) -> None:
    file = tmp_path / "compress.toml"
    file.write_text("[select]\nkeep = 36\n")
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="select", path=file) as caught:
        read_recipe(file)
    assert "selection" in str(caught.value)


def test_a_percentage_of_a_number_is_written_as_a_share() -> None:
    with fails_with(ErrorCode.INVALID_VALUE, UsageError, field="max_drop") as caught:
        recipe_of("m", None, {"max_drop": "1%"})
    assert "0.01" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "code", "field"),
    [
        ({"keep": "-3"}, ErrorCode.OUT_OF_RANGE, "keep"),
        ({"keep": "101%"}, ErrorCode.OUT_OF_RANGE, "keep"),
        ({"keep": "half"}, ErrorCode.INVALID_VALUE, "keep"),
        ({"opset": "19"}, ErrorCode.OUT_OF_RANGE, "opset"),
        ({"method": "dps"}, ErrorCode.UNKNOWN_NAME, "method"),
        ({"target": "openvin"}, ErrorCode.UNKNOWN_NAME, "target"),
        ({"precision": "fp23"}, ErrorCode.UNKNOWN_NAME, "precision"),
        ({"options": "x"}, ErrorCode.INVALID_VALUE, "options"),
        ({"options": "a=1,b=2,a=3"}, ErrorCode.CONTRADICTION, "options"),
        ({"drop_blocks_by_kind": "causal=0.5,causal=0.7"}, ErrorCode.CONTRADICTION, "drop_blocks_by_kind"),
        ({"drop_blocks_by_kind": "causal=1.5"}, ErrorCode.OUT_OF_RANGE, "drop_blocks_by_kind"),
        ({"drop_blocks": "half"}, ErrorCode.INVALID_VALUE, "drop_blocks"),
        ({"drop_blocks": "101%"}, ErrorCode.OUT_OF_RANGE, "drop_blocks"),
        ({"drop_blocks": True}, ErrorCode.INVALID_VALUE, "drop_blocks"),
        ({"block_size": 20}, ErrorCode.OUT_OF_RANGE, "block_size"),
        ({"seq": "0"}, ErrorCode.OUT_OF_RANGE, "seq"),
        ({"ray": "nowhere"}, ErrorCode.INVALID_VALUE, "ray"),
        ({"data": "x", "keep": 1, "training_steps": 0}, ErrorCode.OUT_OF_RANGE, "training_steps"),
        ({"latency": "5"}, ErrorCode.INVALID_VALUE, "latency"),
        ({"latency": "0ms"}, ErrorCode.OUT_OF_RANGE, "latency"),
        ({"macs": "150%"}, ErrorCode.OUT_OF_RANGE, "macs"),
        ({"macs": "0%"}, ErrorCode.OUT_OF_RANGE, "macs"),
        ({"data": "x", "keep": 0}, ErrorCode.OUT_OF_RANGE, "keep"),
        ({"data": "x", "keep": "0%"}, ErrorCode.OUT_OF_RANGE, "keep"),
        ({"data": "x", "keep": "nan%"}, ErrorCode.OUT_OF_RANGE, "keep"),
        ({"parameters": 0.0}, ErrorCode.OUT_OF_RANGE, "parameters"),
        ({"budget_at": "128"}, ErrorCode.INVALID_VALUE, "budget_at"),
    ],
)
def test_a_value_out_of_range_names_its_flag(flags: dict[str, Any], code: ErrorCode, field: str) -> None:
    error = refused("model", None, flags)
    assert (error.code, error.details["field"]) == (code, field)
    assert str(error).startswith(f"{flag_of(field)} ")


@pytest.mark.parametrize("share", ["150%", "-5%", "50", "250", "-1"])
def test_the_percentage_that_replaces_a_share_out_of_range_is_accepted(share: str) -> None:
    (percentage,) = re.findall(r"\S+%", str(refused("model", None, {"macs": share})).partition(";")[2])
    kept = recipe_of("model", None, {"data": "x", "macs": percentage}).budget.macs
    assert kept == (0.5 if share == "50" else 0.9)


def test_messages_name_flags_and_keys_where_they_were_set(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text("keep = 3")
    file = tmp_path / "compress.toml"
    assert str(refused("model", None, {"keep": "3"})) == (
        "--keep 3: there are no rows to learn from; add training rows (--data) or a plan (--plan)"
    )
    assert str(refused(str(tmp_path), None, {})) == (
        f"{file}: keep 3: there are no rows to learn from; add training rows (--data) or a plan (--plan)"
    )
    file.write_text("seed = -1")
    assert str(refused(str(tmp_path), None, {})) == (
        f"{file}: seed -1: must be at least 0 (seed of every random draw); change its value"
    )


@pytest.mark.parametrize(
    ("text", "code", "suggestion"),
    [
        ("keeep = 3", ErrorCode.UNKNOWN_NAME, "did you mean keep?"),
        ("eval-dta = 'x'", ErrorCode.UNKNOWN_NAME, "did you mean eval_data?"),
        ("zzz = 3", ErrorCode.UNKNOWN_NAME, "choose one of model, task"),
        ("keep = ", ErrorCode.FILE_UNREADABLE, ""),
        ("drop_blocks = true", ErrorCode.INVALID_VALUE, ""),
        (f"drop_blocks = 1{'0' * 400}", ErrorCode.INVALID_VALUE, ""),
    ],
)
def test_a_fault_in_a_file_names_the_file(tmp_path: Path, text: str, code: ErrorCode, suggestion: str) -> None:
    file = tmp_path / "compress.toml"
    file.write_text(text)
    error = refused(str(tmp_path), None, {})
    assert error.code is code
    assert str(file) in str(error)
    assert suggestion in str(error)


@given(text=st.text(max_size=60))
def test_any_text_gives_a_recipe_or_a_one_line_error(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "recipe.toml"
    file.write_text(text, encoding="utf-8", errors="surrogateescape" if text.isprintable() else "replace")
    fault: UsageError | None = None
    try:
        recipe_of("model", str(file), {})
    except UsageError as error:
        fault = error
    if fault is not None:
        assert fault.code is not ErrorCode.UNSPECIFIED
        assert len(str(fault).splitlines()) == 1 or "\n" in str(file)


def test_a_missing_recipe_is_refused(tmp_path: Path) -> None:
    assert refused(None, None, {}).code is ErrorCode.MISSING_VALUE
    assert refused(None, str(tmp_path / "r.toml"), {}).code is ErrorCode.FILE_MISSING
    (tmp_path / "r.toml").write_text("keep = 3")
    assert refused(None, str(tmp_path / "r.toml"), {}).details["field"] == "model"


@pytest.mark.parametrize(
    "fields", [{"keep": "half"}, {"keep": "101%"}, {"options": "x"}, {"keep": 3}, {"data": "x", "epochs": 2}]
)
def test_the_recipe_and_the_command_raise_the_same_error(fields: dict[str, Any]) -> None:
    expected = refused("m", None, fields)
    for make in (Recipe, lambda **fields: Recipe.model_validate(fields)):
        with pytest.raises(UsageError) as caught:
            make(model="m", **fields)
        assert str(caught.value) == str(expected)
        assert (caught.value.code, caught.value.details) == (expected.code, expected.details)


def test_fields_of_a_recipe_are_named() -> None:
    model: Any = "model"
    with fails_with(ErrorCode.INVALID_VALUE, UsageError, value=model):
        Recipe(model)
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="modle"):
        Recipe(model="m").updated(modle="n")


def test_a_recipe_needs_a_model() -> None:
    with fails_with(ErrorCode.MISSING_VALUE, UsageError, field="model"):
        Recipe(out="out")
