"""The list of steps: what flags stand for, and lists that are written out."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from compressor.cli.run import run
from compressor.config.ladder import recipes_of
from compressor.config.recipe_file import command_line, recipe_of, steps_text
from compressor.config.run import Recipe
from compressor.config.step_list import extended_plan, steps_of
from compressor.config.steps import (
    STEPS,
    Blocks,
    Distill,
    Follow,
    Heads,
    Step,
    Units,
    Within,
    parts_of,
    step_of,
    steps_from,
)
from compressor.errors import ErrorCode, UsageError
from tests.faults import fails_with

WRITTEN = [Heads(keep=36), Units(speedup=4), Distill(training_steps=2000)]
"""Steps as a user writes them. After heads, units are neurons."""
LISTED = [Heads(keep=36), Units(speedup=4, prune_units="neurons"), Distill(training_steps=2000)]
TABLES: list[dict[str, Any]] = [
    {"heads": {"keep": 36}},
    {"units": {"speedup": 4}},
    {"distill": {"training_steps": 2000}},
]
FILE = """
data = "rows.tsv"
[[steps]]
heads = { method = "dsp", keep = 36 }
[[steps]]
units = { speedup = 4 }
[[steps]]
distill = { training-steps = 2000 }
"""


def within(units: Mapping[str, Any] | None = None, distill: Any = None, **options: Any) -> dict[str, Any]:
    """The table of a step that bisects by the metric."""
    return {"within": {"max_drop": 0.1, "steps": [{"units": units or {}}, {"distill": distill or {}}], **options}}


KINDS: list[tuple[dict[str, Any], list[type[Step]]]] = [
    ({}, []),
    ({"data": "x", "keep": 3}, [Heads]),
    ({"data": "x", "keep": "100%", "target": "auto"}, []),
    ({"data": "x", "drop_blocks": 0.5}, [Blocks]),
    ({"data": "x", "keep": 3, "drop_blocks": 0.5}, [Heads, Blocks]),
    ({"data": "x", "macs": 0.5}, [Units]),
    ({"data": "x", "max_drop": 0.1}, [Within]),
    ({"data": "x", "max_drop": 0.1, "distill": True}, [Within]),
    ({"data": "x", "max_drop": 0.1, "keep": 3, "distill": True}, [Heads, Distill]),
    ({"data": "x", "max_drop": 0.1, "macs": 0.5, "distill": True}, [Units, Distill]),
    ({"data": "x", "method": "dsp", "macs": 0.5}, [Units]),
    ({"data": "x", "keep": 3, "macs": 0.5, "distill": True}, [Heads, Units, Distill]),
    ({"data": "x", "macs": 0.5, "drop_blocks": 0.5, "distill": True}, [Units, Blocks, Distill]),
    ({"data": "x", "plan": "p", "distill": True}, [Follow, Distill]),
    ({"data": "x", "distill": True, "teacher": "t", "keep": "100%", "target": "auto"}, [Distill]),
    ({"plan": "p"}, [Follow]),
]


@pytest.mark.parametrize(("fields", "kinds"), KINDS)
def test_flags_stand_for_steps(fields: dict[str, Any], kinds: list[type[Step]]) -> None:
    recipe = Recipe(model="m", **fields)
    steps = steps_of(recipe)
    assert [type(step) for step in steps] == kinds
    if kinds and "max_drop" not in fields and "target" not in fields:  # settings of the run beside the steps
        written = Recipe(model="m", **{"data": fields["data"]} if "data" in fields else {}, steps=list(steps))
        assert steps_of(written) == steps


@pytest.mark.parametrize(
    "steps", [WRITTEN, TABLES, "[{heads={keep=36}}, {units={speedup=4}}, {distill={training_steps=2000}}]"]
)
def test_steps_are_written_out_as_objects_tables_and_text(steps: Any) -> None:
    recipe = Recipe(model="m", data="d", steps=steps)
    assert list(steps_of(recipe)) == LISTED
    assert steps_of(recipe) == steps_of(Recipe(model="m", data="d", keep=36, speedup=4, distill=True))
    assert Recipe(**recipe.flat()) == recipe
    arguments = shlex.split(command_line(recipe))
    context = run.make_context("run", arguments[2:])
    flags = {name: context.params[name] for name in ("data", "steps")}
    assert steps_of(recipe_of("m", None, flags)) == steps_of(recipe)


def test_steps_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text(FILE)
    assert list(steps_of(recipe_of(str(tmp_path), None, {}))) == LISTED
    changed = steps_of(recipe_of(str(tmp_path), None, {"speedup": 2, "distill_steps": 7, "keep": 3}))
    assert [str(step) for step in changed] == [
        "heads(keep=3)",
        "units(speedup=2.0, prune_units=neurons)",
        "distill(training_steps=7)",
    ]


@pytest.mark.parametrize("flags", [{"drop_blocks": 0.5}, {"distill": True}, {"plan": "p"}])
def test_a_flag_that_no_single_step_reads_is_refused(flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text(FILE)
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field=next(iter(flags))):
        recipe_of(str(tmp_path), None, flags)


@pytest.mark.parametrize(
    ("steps", "code", "field"),
    [
        ([within(steps=[])], ErrorCode.CONTRADICTION, "steps"),
        ([within(steps=[{"distill": {}}])], ErrorCode.CONTRADICTION, "steps"),
        ([within(steps=[{"units": {}}], minutes=3)], ErrorCode.CONTRADICTION, "minutes"),
        ([within(steps=[{"unit": {}}])], ErrorCode.UNKNOWN_NAME, "steps"),
        ([within(units={"macs": 0.5})], ErrorCode.CONTRADICTION, "steps"),
        ([within(units={"certify": 0.9})], ErrorCode.CONTRADICTION, "steps"),
        ([within(minutes=3, distill={"minutes": 2})], ErrorCode.CONTRADICTION, "minutes"),
        ([within(distill={"trainingsteps": 2})], ErrorCode.UNKNOWN_NAME, "trainingsteps"),
        ([within(), {"distill": {}}], ErrorCode.CONTRADICTION, "steps"),
        ([{"units": {"macs": 0.5}}, within()], ErrorCode.CONTRADICTION, "steps"),
        ([{"blocks": {"share": 0.5}}, within()], ErrorCode.CONTRADICTION, "steps"),
        ([{"distill": {}}, within()], ErrorCode.CONTRADICTION, "steps"),
    ],
)
def test_attempts_that_cannot_be_carried_out_are_refused(steps: Any, code: ErrorCode, field: str) -> None:
    with fails_with(code, UsageError, field=field):
        Recipe(model="m", data="d", steps=steps)


def test_a_wrong_step_in_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "compress.toml"
    file.write_text(FILE.replace("units", "unit"))
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, path=file) as caught:
        recipe_of(str(tmp_path), None, {})
    assert str(caught.value).startswith(f"{file}:5: ")


_TABLES = {
    "heads": "heads = { keep = 3 }",
    "units": "units = { macs = 0.5 }",
    "blocks": "blocks = { share = 0.5 }",
    "distill": "distill = {}",
    "within": "within = { max_drop = 0.1 }",
}


@pytest.mark.parametrize("names", [pair * times for pair in itertools.permutations(_TABLES, 2) for times in (1, 2)])
def test_a_list_that_is_refused_names_the_file_and_a_line_of_a_step(names: Sequence[str], tmp_path: Path) -> None:
    file = tmp_path / "compress.toml"
    file.write_text("\n".join(['data = "d"', *(f"[[steps]]\n{_TABLES[name]}" for name in names)]))
    if [name for name in STEPS if name in names] == list(names) and ("within" not in names or "heads" in names):
        recipes_of(str(tmp_path), None, {})
        return
    with pytest.raises(UsageError) as caught:
        recipes_of(str(tmp_path), None, {})
    lines = {2 * number + 2 for number in range(len(names))}
    assert str(caught.value).startswith(tuple(f"{file}:{line}: " for line in lines))


@pytest.mark.parametrize("name", ["distil", "unit"])
def test_a_step_of_an_array_in_a_file_is_named_with_the_line_of_the_array(name: str, tmp_path: Path) -> None:
    file = tmp_path / "compress.toml"
    file.write_text(f'data = "d"\n\nsteps = [\n{{ units = {{ macs = 0.5 }} }},\n{{ {name} = {{}} }},\n]')
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, path=file) as caught:
        recipe_of(str(tmp_path), None, {})
    assert str(caught.value).startswith(f"{file}:3: ")


def test_paths_of_steps_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    steps = "within = { max_drop = 0.1, steps = [{ units = { statistics = 's' } }, { distill = { teacher = 't' } }] }"
    file.write_text(f"data = 'd'\n[[steps]]\n{steps}")
    (step,) = steps_of(recipe_of("model", str(file), {}))
    assert isinstance(step, Within)
    assert step.units.statistics == tmp_path / "s"
    assert step.distill is not None
    assert step.distill.teacher == tmp_path / "t"


def test_an_option_in_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "compress.toml"
    file.write_text('data = "d"\n[[steps]]\nunits = { max_drop = 0.1, certify = 0.9 }\n[[steps]]\ndistill = {}\n')
    with fails_with(ErrorCode.CONTRADICTION, UsageError, fields=("certify", "distill")) as caught:
        recipe_of(str(tmp_path), None, {})
    assert str(caught.value).startswith(f"{file}:2: units.certify 0.9, distill: ")


@pytest.mark.parametrize(
    "option",
    [
        'heads = { method = "taylor", keep = 1, ray = "local" }',
        'blocks = { share = 0.5, maps = "/etc" }',
        'within = { max_drop = 0.1, steps = [{ units = {} }, { distill = { teacher = "/etc" } }] }',
    ],
)
def test_a_model_folder_sets_nothing_unsafe_inside_steps(option: str, tmp_path: Path) -> None:
    file = tmp_path / "compress.toml"
    file.write_text(f"[[steps]]\n{option}\n")
    with fails_with(ErrorCode.UNSAFE_RECIPE, UsageError, path=file):
        recipe_of(str(tmp_path), None, {"data": "d"})
    assert recipe_of(str(tmp_path), str(file), {"model": "m", "data": "d"}).steps


@pytest.mark.parametrize(
    "step",
    [
        Follow(plan=Path("p")),
        Heads(keep="50%", options={"a": {"b": 1}}),
        Blocks(share=0.5),
        Units(macs=0.5),
        Distill(),
        Within(max_drop=0.1, minutes=3, steps=[Units(max_drop=0.1), Distill(training_steps=5)]),
    ],
)
def test_every_step_is_read_as_it_is_written(step: Step) -> None:
    (read,) = steps_from(steps_text([step]))
    assert read == step
    assert STEPS[step.name] is type(step)


@pytest.mark.parametrize("fields", [{}, {"batch": (1,)}, {"target": "ort"}, {"unlabelled_data": "u"}, {"seed": 3}])
def test_rows_alone_mean_as_fast_as_a_point_permits(fields: dict[str, Any]) -> None:
    recipe = Recipe(model="m", data="x", **fields)
    (within,) = steps_of(recipe)
    assert isinstance(within, Within)
    assert within.distill is not None
    assert (within.max_drop, within.units.is_unbounded, recipe.selection.max_drop) == (0.01, True, 0.01)
    assert (within.minutes, within.distill.minutes) == (20, None)
    assert within.distill.seed == recipe.selection.seed
    assert (recipe.engine.target, recipe.engine.precision) == (fields.get("target", "auto"), "auto")
    assert Recipe(**recipe.flat()) == recipe


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, 20)),
        ({"minutes": 4}, (True, 4)),
        ({"max_drop": 0.01, "distill": True, "minutes": 4}, (False, 4)),
        ({"max_drop": 0.01, "distill": True}, (False, None)),
        ({"selection": {"max_drop": 0.01}, "distill": True}, (False, None)),
        ({"steps": [within()]}, (False, None)),
    ],
)
def test_a_loss_that_no_field_sets_is_a_point(fields: dict[str, Any], expected: tuple[bool, int | None]) -> None:
    recipe = Recipe(model="m", data="x", **fields)
    (step,) = steps_of(recipe)
    assert isinstance(step, Within)
    assert (recipe.allows_a_point, step.minutes) == expected
    changed = recipe.updated(max_drop=2.0)
    assert not changed.allows_a_point
    assert not Recipe(**recipe.flat()).allows_a_point


@pytest.mark.parametrize("fields", [{"target": "auto"}, {"precision": "int8"}, {"precision": "auto"}])
def test_rows_with_an_engine_alone_remove_nothing(fields: dict[str, Any]) -> None:
    recipe = Recipe(model="m", data="x", **fields)
    assert (steps_of(recipe), recipe.selection.max_drop) == ((), None)


def test_rows_beside_a_finished_plan_follow_it(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert [step.name for step in steps_of(Recipe(model=tmp_path, data="x"))] == ["follow"]


@pytest.mark.parametrize("flags", [{}, {"distill": True, "distill_steps": 4}, {"method": "fisher"}, {"keep": 3}])
def test_a_budget_removes_more_than_the_plan_in_the_model_folder(flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    recipe = Recipe(model=tmp_path, data="x", speedup=6, **flags)
    follow, units, *_ = steps_of(recipe)
    assert isinstance(follow, Follow)
    assert isinstance(units, Units)
    assert (follow.plan, units.speedup) == (tmp_path / "plan.json", 6)
    assert extended_plan(recipe) == follow.plan
    assert extended_plan(Recipe(model="m", data="x", speedup=6, plan=follow.plan)) is None
    assert extended_plan(Recipe(model=tmp_path, data="x")) is None


@pytest.mark.parametrize("step", STEPS.values())
def test_every_step_says_what_it_does(step: type[Step]) -> None:
    required: dict[str, Any] = {
        "follow": {"plan": "p"},
        "heads": {"keep": 3},
        "blocks": {"share": 0.5},
        "units": {"speedup": 4},
        "within": {"max_drop": 0.1, "steps": [{"units": {}}, {"distill": {}}]},
    }
    explained = step(**required.get(step.name, {})).summary
    assert explained
    assert "None" not in explained


def test_the_seed_and_the_batch_size_of_the_run_are_those_of_steps_that_set_none() -> None:
    steps = [Units(macs=0.5), Distill(seed=3)]
    recipe = Recipe(model="m", data="d", steps=steps, seed=7, batch_size=4)
    assert [(step.seed, step.batch_size) for step in steps_of(recipe)] == [(7, 4), (3, 4)]  # type: ignore[attr-defined]
    assert steps_of(Recipe(**recipe.flat())) == steps_of(recipe)
    arguments = run.make_context("run", shlex.split(command_line(recipe))[2:]).params
    flags = {name: arguments[name] for name in ("data", "steps", "seed", "batch_size")}
    assert steps_of(recipe_of("m", None, flags)) == steps_of(recipe)


def test_a_loss_that_a_flag_allows_replaces_that_of_the_step(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text("data = 'd'\n[[steps]]\nunits = { max_drop = 0.01 }")
    recipe = recipe_of(str(tmp_path), None, {"max_drop": 0.5})
    assert [str(part) for part in parts_of(steps_of(recipe))] == ["units(max_drop=0.5)"]
    assert recipe.selection.max_drop == 0.5


@pytest.mark.parametrize("table", ["units = { max_drop = 0.01 }", "within = { max_drop = 0.01 }"])
@pytest.mark.parametrize("value", [0.5, "0.5"])
def test_the_text_of_a_flag_is_the_loss_of_every_step_that_is_bounded(
    table: str, value: object, tmp_path: Path
) -> None:
    (tmp_path / "compress.toml").write_text(f"data = 'd'\n[[steps]]\n{table}")
    (step,) = steps_of(recipe_of(str(tmp_path), None, {"max_drop": value}))
    assert isinstance(step, Within)
    assert (step.max_drop, step.units.max_drop) == (0.5, 0.5)


def test_units_and_distill_of_a_list_are_bounded_together() -> None:
    listed = Recipe(model="m", data="d", steps=[Units(max_drop=0.1), Distill(minutes=3)])
    flags = Recipe(model="m", data="d", max_drop=0.1, distill=True, minutes=3)
    assert steps_of(listed) == steps_of(flags)


def test_keys_of_steps_beside_a_list_in_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text("data = 'd'\nkeep = 36\n[[steps]]\nunits = { macs = 0.5 }")
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="keep"):
        recipe_of(str(tmp_path), None, {})
    recipe = recipe_of(str(tmp_path), None, {"steps": "[{units={macs=0.4}}]"})
    assert [str(step) for step in steps_of(recipe)] == ["units(macs=0.4)"]


def test_a_ladder_has_its_steps_from_flags(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text("data = 'd'\n[[steps]]\nunits = { macs = 0.5 }")
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="speedup"):
        recipes_of(str(tmp_path), None, {"speedup": "2,4"})


def test_flags_replace_options_of_the_steps_that_a_step_carries_out(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text(f"data = 'd'\nsteps = {steps_text([step_of(within(minutes=3))])}")
    recipe = recipe_of(str(tmp_path), None, {"max_drop": 0.5, "minutes": 4, "distill_steps": 7, "prune_rows": 100})
    (step,) = steps_of(recipe)
    assert isinstance(step, Within)
    assert step.distill is not None
    assert (step.max_drop, step.units.max_drop, recipe.selection.max_drop) == (0.5, 0.5, 0.5)
    assert (step.minutes, step.distill.training_steps, step.units.prune_rows) == (4, 7, 100)
    assert steps_of(Recipe(**recipe.flat())) == (step,)


def test_the_method_of_heads_need_not_be_named() -> None:
    assert Heads("taylor", keep=3) == Heads(method="taylor", keep=3)
    assert Heads(keep=3).model_fields_set == {"keep"}


def test_attempts_have_both_steps_by_default() -> None:
    assert step_of({"within": {"max_drop": 0.1}}) == step_of(within())
    assert Within(max_drop=0.1, steps=[Units(), Distill()]) == step_of(within())


def test_units_that_the_metric_alone_bounds_are_removed_in_attempts() -> None:
    units, alone = Units(max_drop=0.1, certify=0.9), within(steps=[{"units": {"certify": 0.9}}])
    for steps in ([units], [alone]):
        assert steps_of(Recipe(model="m", data="d", steps=steps)) == (Within(max_drop=0.1, steps=[units]),)
