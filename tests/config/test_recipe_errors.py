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
from compressor.config.ladder import recipes_of
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


@pytest.mark.parametrize(
    ("flags", "code", "fields"),
    [
        (
            {"data": "x", "drop_blocks": "0.5", "random_blocks": True, "weight_by_count": True},
            ErrorCode.CONTRADICTION,
            ("random_blocks", "weight_by_count"),
        ),
        ({"data": "x", "maps": "m", "entmax": True, "drop_blocks": 0.5}, ErrorCode.CONTRADICTION, ("maps", "entmax")),
        ({"data": "x", "allow_empty_rows": True}, ErrorCode.MISSING_VALUE, ("keep",)),
        ({"keep": "3"}, ErrorCode.MISSING_VALUE, ("keep", "data")),
        ({"unlabelled_data": "u"}, ErrorCode.MISSING_VALUE, ("unlabelled_data", "data")),
        (
            {"data": "x", "unlabelled_data": "u", "keep": 3, "distill": True},
            ErrorCode.CONTRADICTION,
            ("unlabelled_data", "keep"),
        ),
        (
            {"data": "x", "unlabelled_data": "u", "keep": 3, "method": "dsp", "speedup": 2},
            ErrorCode.CONTRADICTION,
            ("unlabelled_data", "keep"),
        ),
        (
            {"data": "x", "unlabelled_data": "u", "drop_blocks": 0.5, "distill": True},
            ErrorCode.CONTRADICTION,
            ("unlabelled_data", "drop_blocks"),
        ),
        ({"data": "x", "unlabelled_data": "u", "plan": "p"}, ErrorCode.CONTRADICTION, ("unlabelled_data", "distill")),
        ({"drop_blocks": "0.5"}, ErrorCode.MISSING_VALUE, ("drop_blocks", "data")),
        ({"data": "x", "drop_blocks": 0.5, "plan": "p"}, ErrorCode.CONTRADICTION, ("drop_blocks", "plan")),
        ({"data": "x", "epochs": 2}, ErrorCode.MISSING_VALUE, ("keep", "speedup")),
        ({"data": "x", "method": "taylor"}, ErrorCode.MISSING_VALUE, ("keep", "max_drop")),
        ({"max_drop": "0.1"}, ErrorCode.MISSING_VALUE, ("max_drop", "data")),
        ({"data": "x", "keep": 1, "match_dense": True}, ErrorCode.CONTRADICTION, ("match_dense", "macs")),
        (
            {"data": "x", "macs": 0.5, "distill": True, "teacher": "t", "match_dense": True},
            ErrorCode.CONTRADICTION,
            ("match_dense", "teacher"),
        ),
        ({"data": "x", "keep": 1, "ray": "local"}, ErrorCode.CONTRADICTION, ("ray", "method")),
        ({"data": "x", "keep": 1, "certify": 0.9}, ErrorCode.CONTRADICTION, ("certify", "max_drop")),
        (
            {"data": "x", "macs": 0.5, "max_drop": 0.1, "certify": 0.9},
            ErrorCode.CONTRADICTION,
            ("certify", "max_drop"),
        ),
        (
            {"data": "x", "max_drop": 0.1, "certify": 0.9, "method": "reconstruct", "precision": "int8"},
            ErrorCode.CONTRADICTION,
            ("certify", "precision"),
        ),
        (
            {"data": "x", "method": "astar", "keep": "3", "max_drop": "0.1", "certify": "0.95"},
            ErrorCode.CONTRADICTION,
            ("certify", "keep"),
        ),
        (
            {"data": "x", "method": "taylor", "max_drop": "0.1", "certify": 0.9, "speedup": 2},
            ErrorCode.CONTRADICTION,
            ("certify", "speedup"),
        ),
        (
            {"data": "x", "method": "taylor", "max_drop": "0.1", "certify": 0.9, "distill": True},
            ErrorCode.CONTRADICTION,
            ("certify", "distill"),
        ),
        ({"data": "x", "keep": 1, "group_by": "query"}, ErrorCode.CONTRADICTION, ("group_by", "method")),
        (
            {"data": "x", "keep": 1, "method": "dsp", "macs": "50%", "group_by": "query"},
            ErrorCode.CONTRADICTION,
            ("group_by", "method"),
        ),
        (
            {"data": "x", "macs": "50%", "group_by": "query", "prune_units": "neurons"},
            ErrorCode.CONTRADICTION,
            ("group_by", "prune_units"),
        ),
        (
            {"data": "x", "keep": "50%", "macs": "50%", "prune_units": "heads"},
            ErrorCode.CONTRADICTION,
            ("prune_units", "method"),
        ),
        (
            {"data": "x", "keep": "50%", "method": "reconstruct", "prune_units": "neurons"},
            ErrorCode.CONTRADICTION,
            ("keep", "prune_units"),
        ),
        ({"data": "x", "method": "dsp", "speedup": 2}, ErrorCode.MISSING_VALUE, ("keep",)),
        ({"data": "x", "method": "dsp", "speedup": 2, "target": "auto"}, ErrorCode.MISSING_VALUE, ("keep",)),
        ({"data": "x", "method": "ste", "latency": "5ms", "macs": "50%"}, ErrorCode.MISSING_VALUE, ("keep",)),
        (
            {"data": "x", "method": "dsp", "macs": "50%", "start_from": "out"},
            ErrorCode.CONTRADICTION,
            ("start_from", "method"),
        ),
        (
            {"data": "x", "max_drop": 0.01, "method": "reconstruct", "start_from": "out"},
            ErrorCode.CONTRADICTION,
            ("start_from", "max_drop"),
        ),
        (
            {"data": "x", "method": "dsp", "macs": "50%", "drop_blocks": 0.5},
            ErrorCode.CONTRADICTION,
            ("macs", "drop_blocks"),
        ),
        ({"data": "x", "macs": "50%", "plan": "p"}, ErrorCode.CONTRADICTION, ("macs", "plan")),
        ({"data": "x", "macs": "50%", "plan": "p", "method": "dsp"}, ErrorCode.CONTRADICTION, ("macs", "plan")),
        ({"speedup": 2, "plan": "p"}, ErrorCode.CONTRADICTION, ("speedup", "plan")),
        ({"data": "x", "latency": "1ms", "plan": "p", "distill": True}, ErrorCode.CONTRADICTION, ("latency", "plan")),
        (
            {"data": "x", "macs": "50%", "start_from": "out", "plan": "p"},
            ErrorCode.CONTRADICTION,
            ("macs", "plan"),
        ),
        ({"data": "x", "speedup": 2, "latency": "5ms"}, ErrorCode.CONTRADICTION, ("speedup", "latency")),
        ({"data": "x", "parameters": "50%", "budget_at": "1x128"}, ErrorCode.CONTRADICTION, ("budget_at", "speedup")),
        ({"speedup": 2}, ErrorCode.MISSING_VALUE, ("speedup", "data")),
        (
            {"data": "x", "keep": 36, "method": "reconstruct", "macs": "50%"},
            ErrorCode.CONTRADICTION,
            ("keep", "macs"),
        ),
        ({"target": "trt", "provider": "cpu"}, ErrorCode.CONTRADICTION, ("provider", "target")),
        ({"kernel": "k.so", "provider": "cuda"}, ErrorCode.CONTRADICTION, ("kernel", "target")),
    ],
)
def test_contradicting_fields_are_named(flags: dict[str, Any], code: ErrorCode, fields: tuple[str, ...]) -> None:
    error = refused("model", None, flags)
    assert (error.code, error.details["fields"]) == (code, fields)
    assert "<" not in str(error)


@pytest.mark.parametrize("budget", ["4", "2,4"])
@pytest.mark.parametrize("flags", [{}, {"distill": True}, {"start_from": "out"}])
def test_a_plan_of_the_model_folder_excludes_budgets(tmp_path: Path, budget: str, flags: dict[str, Any]) -> None:
    (tmp_path / "plan.json").touch()
    with pytest.raises(UsageError) as caught:
        recipes_of(str(tmp_path), None, {"data": "x", "speedup": budget, **flags})
    assert (caught.value.code, caught.value.details["fields"]) == (ErrorCode.CONTRADICTION, ("speedup", "plan"))
    assert f"--start-from {tmp_path}" in str(caught.value)
    (student,) = recipes_of(str(tmp_path), None, {"data": "x", "distill": True})
    assert student.plan_file == tmp_path / "plan.json"


def test_no_rung_of_a_ladder_follows_a_plan() -> None:
    with pytest.raises(UsageError) as caught:
        recipes_of("model", None, {"data": "x", "macs": "50%,30%", "plan": "p"})
    assert caught.value.details["fields"] == ("macs", "plan")


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
    assert str(refused(str(tmp_path), None, {})) == (f"{file}: seed -1: must be at least 0 (seed of every random draw)")


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
