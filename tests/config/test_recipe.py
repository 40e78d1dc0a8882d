"""Recipes: a flag, a key of compress.toml and a field are the same."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, get_args

import pydantic
import pytest

from compressor.cli.run import run
from compressor.config.fields import flag_of
from compressor.config.methods import BUDGET_METHODS, METHODS, PENALISED_METHODS
from compressor.config.recipe_file import command_line, json_schema, recipe_of
from compressor.config.run import FIELDS, SECTION_OF, SECTIONS, Recipe
from compressor.config.step_list import steps_of
from compressor.config.steps import Units, part_of
from compressor.config.values import AttentionKind
from compressor.errors import ErrorCode, UsageError
from compressor.report import formatting
from compressor.selection.options import option_names
from compressor.selection.pruners.base import Pruner
from graph_passes import Kind
from tests.faults import fails_with


def test_every_field_is_one_flag_and_every_flag_one_field() -> None:
    internal = {"words", "file", "penalty", "steps", "quiet", "debug", "json"}
    options = {str(option.name): option for option in run.params if not getattr(option, "hidden", False)}
    assert set(options) - internal == set(FIELDS)
    assert all(flag_of(name) in options[name].opts for name in FIELDS if name != "model")


def test_field_names_are_unique_over_all_sections() -> None:
    assert len(FIELDS) == sum(len(section.model_fields) for section in SECTIONS.values())
    assert not set(FIELDS) & set(SECTIONS)


def test_a_recipe_may_be_flat_or_nested() -> None:
    nested = Recipe(source={"model": "m"}, rows={"data": "d"}, selection={"keep": 3}, engine={"target": "ort"})
    assert Recipe(model="m", data="d", keep=3, target="ort") == nested
    assert nested.value("keep") == nested.selection.keep == 3


def test_a_flag_and_a_file_set_the_same_fields(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text(
        """
        data = "rows.tsv"
        keep = "50%"
        batch = [1, 8]
        opset = 23
        options = { tau_ini = 100.0, cooldown = 0.5 }
        text_columns = ["premise", "hypothesis"]
        force = true
        """
    )
    flags = {
        "data": str(tmp_path / "rows.tsv"),
        "keep": "50%",
        "batch": "1,8",
        "opset": "23",
        "options": "tau_ini=100.0,cooldown=0.5",
        "text_columns": "premise,hypothesis",
        "force": True,
    }
    assert recipe_of(str(tmp_path), None, {}) == recipe_of(str(tmp_path), None, flags)


def test_keys_are_accepted_in_the_table_of_their_section(tmp_path: Path) -> None:
    (tmp_path / "flat.toml").write_text('model = "m"\ndata = "d"\nkeep = 3\nprecision = "fp16"\n')
    (tmp_path / "tables.toml").write_text(
        '[source]\nmodel = "m"\n[rows]\ndata = "d"\n[selection]\nkeep = 3\n[engine]\nprecision = "fp16"\n'
    )
    flat, tables = (recipe_of(None, str(tmp_path / f"{name}.toml"), {}) for name in ("flat", "tables"))
    assert flat == tables


def test_a_flag_overrides_the_file(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text('data = "rows.tsv"\nkeep = 3\nforce = true')
    recipe = recipe_of(str(tmp_path), None, {"keep": "5", "force": False})
    assert (recipe.selection.keep, recipe.output.force, recipe.rows.data) == (5, False, str(tmp_path / "rows.tsv"))


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("label\ttext\n")
    (tmp_path / "r.toml").write_text('model = "m"\nout = "o"\nkeep = 1\ndata = "rows.tsv"\neval_data = "owner/name"')
    recipe = recipe_of(None, str(tmp_path / "r.toml"), {})
    assert (recipe.source.model, recipe.output.out) == (tmp_path / "m", tmp_path / "o")
    assert (recipe.rows.data, recipe.rows.eval_data) == (str(tmp_path / "rows.tsv"), "owner/name")


@pytest.mark.parametrize("name", ["rows.tsv", "rows.JSONL", "rows.csv.gz"])
def test_a_missing_file_of_rows_is_not_sought_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("label\ttext\n")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "r.toml").write_text(f'model = "m"\nkeep = 1\ndata = "{name}"')
    monkeypatch.chdir(tmp_path)
    assert recipe_of(None, "recipes/r.toml", {}).rows.data == str(Path("recipes") / name)


@pytest.mark.parametrize(
    ("fields", "learns_units"),
    [
        ({"method": "dsp", "macs": "50%"}, True),
        ({"method": "dsp", "macs": "50%", "target": "auto"}, True),
        ({"method": "hard-concrete", "parameters": "90%"}, True),
        ({"method": "hard-concrete", "speedup": 2}, False),
        ({"method": "dsp", "keep": 36, "macs": "50%"}, False),
        ({"method": "dsp", "keep": 36}, False),
        ({"method": "astar", "max_drop": 0.1, "macs": "50%"}, False),
        ({"macs": "50%"}, False),
    ],
)
def test_a_gate_without_a_number_of_heads_learns_within_a_budget(fields: dict[str, Any], learns_units: bool) -> None:
    recipe = Recipe(model="m", data="d", **fields)
    assert recipe.learns_units == learns_units
    assert recipe.prunes == recipe.budget.is_set


@pytest.mark.parametrize(
    "flags",
    [
        {"drop_blocks": "90%", "drop_blocks_by_kind": "cross=25%"},
        {"drop_blocks": "0.9", "drop_blocks_by_kind": "cross=0.25"},
    ],
)
def test_a_share_is_a_number_or_a_percentage(flags: dict[str, str]) -> None:
    blocks = recipe_of("model", None, {"data": "x.tsv", **flags}).blocks
    assert (blocks.drop_blocks, blocks.drop_blocks_by_kind) == (0.9, {"cross": 0.25})


def test_maps_may_be_named_by_their_folder(tmp_path: Path) -> None:
    for maps in (tmp_path, tmp_path / "maps.safetensors"):
        recipe = recipe_of("model", None, {"data": "x.tsv", "drop_blocks": 0.9, "maps": maps})
        assert recipe.blocks.maps == tmp_path / "maps.safetensors"


def test_a_recipe_is_frozen_and_refuses_unknown_fields() -> None:
    recipe = Recipe(model=Path("m"))
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        recipe.selection.seed = 3  # type: ignore[misc]
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="keeep", value=3):
        Recipe(model="m", keeep=3)


@pytest.mark.parametrize(
    ("minutes", "fields", "expected"),
    [
        (None, {}, (2048, 300, 10.0)),
        (20, {}, (2048, 300, 10.0)),
        ("10", {}, (1024, 150, 5.0)),
        (4, {}, (409, 100, 2.0)),
        (4, {"calibration_rows": 300, "seconds": 7}, (409, 300, 7.0)),
        (0.1, {}, (256, 100, 1.0)),
    ],
)
def test_a_plain_run_of_few_minutes_reads_fewer_rows_and_measures_less(
    minutes: float | None, fields: dict[str, Any], expected: tuple[int, int, float]
) -> None:
    limit = {} if minutes is None else {"minutes": minutes}
    recipe = Recipe(model="m", data="d", **limit, **fields)
    units = part_of(steps_of(recipe), Units)
    assert units is not None
    assert (units.prune_rows, recipe.engine.calibration_rows, recipe.measure.seconds) == expected
    again = recipe_of("m", "/dev/null", {"data": "d", "max_drop": 0.01, "distill": True, **limit})
    assert again.measure.seconds == 10.0  # a run that says what to do is measured as it says


def test_the_command_line_of_a_recipe_gives_the_same_recipe() -> None:
    fields = {"data": "a b.tsv", "keep": "50%", "batch": "1,2", "options": "a=1,b=x", "force": True}
    recipe = recipe_of("my model", None, fields)
    arguments = shlex.split(command_line(recipe))
    assert arguments[:3] == ["compress", "run", "my model"]
    context = run.make_context("run", arguments[2:])
    flags = {name: value for name, value in context.params.items() if value and name in FIELDS}
    assert recipe_of(flags.pop("model"), None, flags) == recipe


def test_the_command_line_names_a_method_that_a_budget_would_replace() -> None:
    recipe = Recipe(model="m", data="d", method="dsp", macs="50%")
    assert "--method dsp" in command_line(recipe)
    assert "--method" not in command_line(Recipe(model="m", data="d", keep="50%"))


def test_lambda_sets_the_penalty_and_keeps_the_other_options(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text(
        'data = "d"\nmethod = "bin-concrete"\noptions = { initial = 0, penalty = 1 }'
    )
    selection = recipe_of(str(tmp_path), None, {}, options={"penalty": 0.02}).selection
    assert (selection.keep, selection.options) == (None, {"initial": 0, "penalty": 0.02})
    recipe = recipe_of(str(tmp_path), None, {"options": "beta=0.5"}, options={"penalty": 0.02})
    assert recipe.selection.options == {"beta": 0.5, "penalty": 0.02}
    context = run.make_context("run", [str(tmp_path), "--lambda", "0.02"])
    assert context.params["penalty"] == 0.02


@pytest.mark.parametrize("kind", ["heads = {", "units = { macs = 0.5,"])
def test_lambda_sets_the_penalty_of_the_step_in_a_list(kind: str, tmp_path: Path) -> None:
    table = f"{kind} method = 'bin-concrete', options = {{ initial = 0, penalty = 1 }} }}"
    (tmp_path / "compress.toml").write_text(f"data = 'd'\n[[steps]]\n{table}")
    (step,) = steps_of(recipe_of(str(tmp_path), None, {}, options={"penalty": 0.02}))
    assert step.options == {"initial": 0, "penalty": 0.02}  # type: ignore[attr-defined]


def test_the_schema_describes_every_key_and_every_recipe_follows_it() -> None:
    schema = json_schema()
    dashed = {name.replace("_", "-") for name in FIELDS}
    assert set(schema["properties"]) == {*FIELDS, *dashed, *SECTIONS, "steps"}
    assert schema["properties"]["method"]["enum"] == list(METHODS)
    assert not {"heading", "runs_code"} & set(schema["properties"]["kernel"])
    import jsonschema

    validator = jsonschema.validators.validator_for(schema)(schema)
    validator.check_schema(schema)
    recipe = Recipe(model="m", data="d", keep="50%", drop_blocks_by_kind="cross=0.5", seq="8,16")
    validator.validate(json.loads(json.dumps(recipe.flat())))
    accepted: list[dict[str, Any]] = [
        {"selection": {"keep": 36}, "eval-data": "dev.tsv"},
        {"macs": "50%", "batch": 8, "options": "a=1"},
        {"speedup": [2, 4], "latency": ["5ms", "3ms"]},
    ]
    refused: list[dict[str, Any]] = [
        {"keeep": 3},
        {"selection": {"macs": 0.5}},
        {"distill": "maybe"},
        {"batch": {"a": 1}},
    ]
    for content in accepted:
        validator.validate(content)
    for content in refused:
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(content)


def test_kinds_of_attention_equal_those_of_plans() -> None:
    """They are defined twice, because a recipe must not import the graph libraries."""
    assert get_args(AttentionKind) == get_args(Kind)


def test_penalised_methods_have_a_penalty() -> None:
    for name in METHODS:
        assert ("penalty" in option_names(name)) == (name in PENALISED_METHODS), name


def test_methods_under_a_budget_are_pruners() -> None:
    assert {"reconstruct", "fisher", "magnitude"} <= set(BUDGET_METHODS)
    for name, method in METHODS.items():
        assert issubclass(method.load(), Pruner) == (name in BUDGET_METHODS), name


def test_every_section_is_read_by_the_recipe() -> None:
    assert {SECTION_OF[name] for name in FIELDS} == set(SECTIONS) == set(Recipe.model_fields) - {"steps"}


@pytest.mark.parametrize(
    "fields",
    [
        {"keep": 36},
        {"macs": "50%", "batch": (1, 8)},
        {"max_drop": 0.01, "target": "auto", "precision": "auto"},
        {"speedup": 4, "distill": True, "distill_steps": 100},
        {"keep": 3, "drop_blocks": 0.5},
    ],
)
def test_the_recipe_of_a_report_is_read_back(fields: dict[str, Any], tmp_path: Path) -> None:
    recipe = Recipe(model=tmp_path, data=tmp_path / "rows.tsv", out=tmp_path / "out", **fields)
    file = tmp_path / "compress.toml"
    file.write_text(formatting.toml(json.loads(json.dumps(recipe.flat(), default=str))))
    assert recipe_of(None, str(file), {}).flat() == recipe.flat()


def test_a_key_that_is_set_twice_is_refused(tmp_path: Path) -> None:
    for text in ("keep = 36\n[selection]\nkeep = 12\n", 'eval_data = "a"\neval-data = "b"\n'):
        (tmp_path / "a.toml").write_text(text)
        with fails_with(ErrorCode.CONTRADICTION, UsageError, path=tmp_path / "a.toml"):
            recipe_of("model", str(tmp_path / "a.toml"), {})


@pytest.mark.parametrize(
    ("fields", "reads_none"),
    [
        ({"precision": "int8"}, True),
        ({"precision": "int8", "keep": "100%"}, True),
        ({"precision": "int4w"}, True),
        ({"precision": "int4w", "keep": "100%"}, True),
        ({"precision": "auto", "macs": 0.5}, True),
        ({"precision": "int8", "keep": "50%"}, False),
        ({"keep": "50%"}, False),
    ],
)
def test_labels_of_training_rows_are_read_only_to_learn_from_them(fields: dict[str, Any], reads_none: bool) -> None:
    steps = steps_of(Recipe(model=Path("m"), data="rows.txt", **fields))
    assert any(step.reads_labels for step in steps) is not reads_none
