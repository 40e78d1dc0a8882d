"""The recipes of a ladder: ordered, chained, each value once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from compressor.config.ladder import recipes_of
from compressor.config.recipe_file import command_line
from compressor.config.run import Recipe
from compressor.config.step_list import steps_of
from compressor.config.steps import Distill, Units
from compressor.errors import ErrorCode, UsageError
from tests.faults import fails_with


def flags_of(**flags: Any) -> dict[str, Any]:
    fields = {"data": "train.tsv", "macs": "90%,80%", "out": "frontier", **flags}
    return {name: value for name, value in fields.items() if value is not None}


def rungs(**flags: Any) -> tuple[Recipe, ...]:
    return recipes_of("model", None, flags_of(**flags))


def test_rungs_are_ordered_from_the_mildest_and_start_from_each_other() -> None:
    out = Path("frontier")
    mild, strict = rungs(macs="80%,90%")
    assert [recipe.output.out for recipe in (mild, strict)] == [out / "macs-90", out / "macs-80"]
    assert [recipe.budget.macs for recipe in (mild, strict)] == [0.9, 0.8]
    assert mild.budget.start_from is None
    assert strict.budget.start_from == out / "macs-90"
    speedups = rungs(macs=None, speedup="8,2,4")
    assert [recipe.budget.speedup for recipe in speedups] == [2, 4, 8]
    (single,) = rungs(macs="60%")
    assert single.output.out == out


def test_a_recipe_is_read_from_a_pipe_once_for_all_rungs() -> None:
    readable, writable = os.pipe()
    os.write(writable, b'data = "train.tsv"\nmacs = "90%,80%"\nkeep = "100.0%"\n')
    os.close(writable)
    try:
        recipes = recipes_of("model", f"/dev/fd/{readable}", {})
    finally:
        os.close(readable)
    assert [(recipe.budget.macs, recipe.selection.keep) for recipe in recipes] == [(0.9, "100%"), (0.8, "100%")]


@pytest.mark.parametrize(
    "flags", [{"speedup": "2,3"}, {"macs": "60%,150%"}, {"macs": "60%,0%"}, {"macs": "0%,60%"}, {"macs": "60%,x"}]
)
def test_rungs_that_contradict_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        rungs(**flags)
    assert caught.value.code in {ErrorCode.CONTRADICTION, ErrorCode.OUT_OF_RANGE, ErrorCode.INVALID_VALUE}


@pytest.mark.parametrize(
    ("name", "values"),
    [("macs", "60%,60%"), ("macs", "50%,50.0%"), ("macs", "0.5,50%"), ("speedup", "2,2.0"), ("latency", "5ms,5000us")],
)
def test_a_value_in_two_forms_is_given_twice(name: str, values: str) -> None:
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field=name):
        rungs(**{"macs": None, name: values})


def test_a_rung_has_the_same_folder_however_its_value_is_written() -> None:
    assert [recipe.output.out for recipe in rungs(macs="0.9,0.05")] == [
        recipe.output.out for recipe in rungs(macs="90%,5.0%")
    ]


@pytest.mark.parametrize("values", ["90%,80%", "90%,80%,70%,60%"])
def test_rungs_share_the_minutes_evenly(values: str) -> None:
    shares = [recipe.distillation.minutes for recipe in rungs(macs=values, distill=True, minutes=6)]
    assert sum(filter(None, shares)) == pytest.approx(6)
    assert len(set(shares)) == 1


def test_only_ladders_have_a_page_for_engines_of_other_tools() -> None:
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="compare_points"):
        rungs(macs="90%", compare_points="rivals.json")


def test_the_command_of_a_rung_compares_nothing() -> None:
    mild, _ = rungs(compare_points="rivals.json")
    assert "compare" not in command_line(mild)


UNITS = "{ units = { macs = 0.9 } }, { distill = {} }, { units = { macs = 0.8 } }, { distill = { temperature = 3 } }"


@pytest.mark.parametrize("is_flag", [True, False])
def test_a_list_with_several_budgets_is_the_ladder_of_flags(is_flag: bool, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"data": "train.tsv", "out": "frontier"}
    if not is_flag:
        (tmp_path / "compress.toml").write_text(f"steps = [{UNITS}]")
    listed = recipes_of(str(tmp_path), None, {**flags, **({"steps": f"[{UNITS}]"} if is_flag else {})})
    by_flags = recipes_of(str(tmp_path), "/dev/null", {**flags, "macs": "90%,80%", "distill": True})
    assert [rung.output.out for rung in listed] == [rung.output.out for rung in by_flags]
    assert [steps_of(rung)[0] for rung in listed] == [steps_of(rung)[0] for rung in by_flags]
    assert [step.temperature for rung in listed for step in steps_of(rung) if isinstance(step, Distill)] == [2, 3]


@pytest.mark.parametrize(
    "steps",
    [
        "{ units = { macs = 0.8 } }, { units = { macs = 0.9 } }",  # not in order
        "{ units = { macs = 0.9 } }, { units = { macs = 0.9 } }",
        "{ units = { macs = 0.9 } }, { units = { speedup = 2 } }",
        "{ units = { macs = 0.9, parameters = 0.9 } }, { units = { macs = 0.8, parameters = 0.8 } }",
        "{ units = { macs = 0.9 } }, { units = { macs = 0.8 } }, { distill = {} }",
        "{ units = { macs = 0.9 } }, { distill = {} }, { distill = {} }",
        "{ within = { max_drop = 0.1 } }, { within = { max_drop = 0.2 } }",
    ],
)
def test_lists_that_are_no_ladder_are_refused(steps: str) -> None:
    with pytest.raises(UsageError) as caught:
        recipes_of("model", "/dev/null", {"data": "train.tsv", "steps": f"[{steps}]"})
    assert caught.value.code is ErrorCode.CONTRADICTION


@pytest.mark.parametrize("flags", [{"distill_steps": 7}, {"macs": "0.7"}, {"prune_rows": 16}])
def test_a_flag_of_a_step_that_a_ladder_repeats_is_refused(flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text(f"data = 'train.tsv'\nsteps = [{UNITS}]")
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field=next(iter(flags))):
        recipes_of(str(tmp_path), None, flags)


def test_settings_beside_a_list_hold_for_every_rung(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text(f"data = 'train.tsv'\nsteps = [{UNITS}]")
    rungs = recipes_of(str(tmp_path), None, {"seed": 7})
    assert [step.seed for rung in rungs for step in steps_of(rung)] == [7] * 4  # type: ignore[attr-defined]


def test_masks_of_a_rung_are_learned_of_the_whole_model() -> None:
    rungs = recipes_of("model", "/dev/null", {"data": "train.tsv", "macs": "90%,80%", "drop_blocks": 0.5})
    assert [[step.name for step in steps_of(rung)] for rung in rungs] == [["units", "blocks"]] * 2
    assert all(step.start_from is None for rung in rungs for step in steps_of(rung) if isinstance(step, Units))


def test_heads_of_a_list_are_selected_of_the_whole_model_for_every_rung() -> None:
    parts = "{ heads = { keep = 1 } }, { units = { macs = 0.9 } }, { heads = { keep = 1 } }, { units = { macs = 0.8 } }"
    rungs = recipes_of("model", "/dev/null", {"data": "train.tsv", "steps": f"[{parts}]"})
    assert [[step.name for step in steps_of(rung)] for rung in rungs] == [["heads", "units"]] * 2
    assert all(step.start_from is None for rung in rungs for step in steps_of(rung) if isinstance(step, Units))
