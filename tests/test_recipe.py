"""The recipe: a flag, a key of compress.toml and a field are one thing, and a fault in one is one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pydantic
import pytest

from compressor.cli.run import run
from compressor.config.run import PENALISED_METHODS, SEARCH_METHODS, Method, Recipe, command_line, flag_of, make
from compressor.errors import UsageError
from compressor.selection.gates import GATES
from compressor.selection.learn import METHODS, pool_options, sample_options, schedule_options
from compressor.selection.options import defaults
from compressor.selection.search import SEARCHES

README = Path(__file__).parent.parent / "README.md"


def test_every_field_is_one_flag_and_every_flag_one_field() -> None:
    flags = {str(option.name): option.opts for option in run.params if option.name not in ("more", "file", "penalty")}
    common = {"quiet", "debug", "json"}
    assert set(flags) - common == set(Recipe.model_fields)
    assert all(flag_of(name) in opts for name, opts in flags.items() if name != "model")


def test_a_flag_and_a_file_say_the_same(tmp_path: Path) -> None:
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
        "data": "rows.tsv",
        "keep": "50%",
        "batch": "1,8",
        "opset": "23",
        "options": "tau_ini=100.0,cooldown=0.5",
        "text_columns": "premise,hypothesis",
        "force": True,
    }
    assert make(str(tmp_path), None, {}) == make(str(tmp_path), None, flags)


def test_a_flag_wins(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text('data = "rows.tsv"\nkeep = 3\nforce = true')
    recipe = make(str(tmp_path), None, {"keep": "5", "force": False})
    assert (recipe.keep, recipe.force, recipe.data) == (5, False, "rows.tsv")


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("label\ttext\n")
    (tmp_path / "r.toml").write_text('model = "m"\nout = "o"\nkeep = 1\ndata = "rows.tsv"\neval_data = "owner/name"')
    recipe = make(None, str(tmp_path / "r.toml"), {})
    assert (recipe.model, recipe.out) == (tmp_path / "m", tmp_path / "o")
    assert (recipe.data, recipe.eval_data) == (str(tmp_path / "rows.tsv"), "owner/name")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"keep": "-3"}, "--keep '-3': out of range; give a count of heads from 0 up, or a share from 0% to 100%"),
        ({"keep": "101%"}, "--keep '101%': out of range; give a count of heads from 0 up, or a share from 0% to 100%"),
        ({"keep": "half"}, "--keep 'half': neither a count nor a share; give a number such as 36, or 50%"),
        ({"opset": "19"}, "--opset 19: input should be 18 or 23 (ONNX operator set of the exported graph)"),
        ({"options": "x"}, "--options 'x': not name=value, divided by commas (options of the method: "),
        ({"options": "a=1,b=2,a=3"}, "--options 'a=1,b=2,a=3': a is there twice; leave one out"),
        (
            {"prune": "causal=0.5,causal=0.7"},
            "--prune 'causal=0.5,causal=0.7': causal is there twice; leave one out",
        ),
        ({"prune": "causal=1.5"}, "--prune 1.5: out of range; give a share from 0 to 1, or 90%"),
        ({"blocks": "half"}, "--blocks 'half': no share; give a number from 0 to 1, or 90%"),
        ({"blocks": "101%"}, "--blocks '101%': out of range; give a share from 0 to 1, or 90%"),
        (
            {"data": "x.tsv", "blocks": "0.5", "random_blocks": True, "weigh_by_rows": True},
            "--random-blocks, --weigh-by-rows: what is drawn has no rank; leave one of them out",
        ),
        (
            {"data": "x.tsv", "empty_rows": True},
            "dsp learns which heads to keep, not how many; say how many (--keep), or what share of the blocks",
        ),
        ({"seq": "0"}, "--seq '0': input should be greater than or equal to 1 (lengths to time"),
        ({"keep": "3"}, "--keep 3: there are no rows to learn from; give them (--data), or a plan (--plan)"),
        ({"data": "x.tsv"}, "dsp learns which heads to keep, not how many; say how many (--keep)"),
        ({"max_drop": "0.1"}, "--max-drop 0.1: there are no rows to score; give them (--data)"),
        (
            {"data": "x.tsv", "method": "astar", "keep": "3", "max_drop": "0.1", "guarantee": "0.95"},
            "--guarantee 0.95, --keep 3: the guarantee decides",
        ),
    ],
)
def test_a_fault_is_one_line(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make("model", None, flags)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keeep = 3", "unknown key keeep; did you mean keep?"),
        ("eval-dta = 'x'", "unknown key eval_dta; did you mean eval_data?"),
        ("zzz = 3", "unknown key zzz; choose one of model, task"),
        ("keep = ", "not a recipe ("),
        ("blocks = true", "blocks True: no share; give a number from 0 to 1, or 90%"),
        (f"blocks = 1{'0' * 400}", "blocks 1000"),
        ("blocks = 0.5", "blocks: there are no rows to watch and to learn from; give them (--data)"),
        ("keep = 3", "keep 3: there are no rows to learn from; give them (--data), or a plan (--plan)"),
        ("seed = -1", "seed -1: input should be greater than or equal to 0 (seed of everything that is drawn)"),
    ],
)
def test_a_fault_in_a_file_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "compress.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(f"{file}: {message}")):
        make(str(tmp_path), None, {})


@pytest.mark.parametrize("flags", [{"blocks": "90%", "prune": "cross=25%"}, {"blocks": "0.9", "prune": "cross=0.25"}])
def test_a_share_is_a_number_or_percent(flags: dict[str, str]) -> None:
    recipe = make("model", None, {"data": "x.tsv", **flags})
    assert (recipe.blocks, recipe.prune) == (0.9, {"cross": 0.25})


def test_maps_may_be_named_by_their_folder(tmp_path: Path) -> None:
    for maps in (tmp_path, tmp_path / "maps.safetensors"):
        assert make("model", None, {"data": "x.tsv", "blocks": 0.9, "maps": maps}).maps == tmp_path / "maps.safetensors"


def test_frozen_and_closed() -> None:
    recipe = Recipe(model=Path("m"))
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError, match="Extra inputs"):
        Recipe.model_validate({"model": "m", "keeep": 3})


def test_the_command_line_asks_for_the_same_run() -> None:
    recipe = make(
        "my model", None, {"data": "a b.tsv", "keep": "50%", "batch": "1,2", "options": "a=1,b=x", "force": True}
    )
    words = shlex.split(command_line(recipe))
    assert words[:3] == ["compress", "run", "my model"]
    context = run.make_context("run", words[2:])
    params = {name: value for name, value in context.params.items() if value and name in Recipe.model_fields}
    assert make(params.pop("model"), None, params) == recipe


def test_what_heads_may_cost_is_part_of_a_search_without_a_number() -> None:
    def key(**fields: object) -> str:
        return Recipe.model_validate({"model": "m", "data": "rows.tsv", "method": "astar", **fields}).learning_key()

    assert key(max_drop=0.01) != key(max_drop=0.02)
    assert key(max_drop=0.01, keep=3) == key(max_drop=0.02, keep=3)


def test_learning_is_keyed_by_what_decides_it() -> None:
    recipe = Recipe(model=Path("m"), data="d", keep=3)
    key = recipe.learning_key(model="sha256:1")
    assert (
        recipe.model_copy(update={"out": Path("x"), "opset": 23, "batch": (1,)}).learning_key(model="sha256:1") == key
    )
    assert recipe.model_copy(update={"seed": 1}).learning_key(model="sha256:1") != key
    assert recipe.learning_key(model="sha256:2") != key


def test_methods_are_those_that_are_registered() -> None:
    assert get_args(Recipe.model_fields["method"].annotation) == METHODS


def test_lambda_is_the_penalty_beside_the_other_options(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text(
        'data = "d"\nmethod = "bin-concrete"\noptions = { initial = 0, penalty = 1 }'
    )
    recipe = make(str(tmp_path), None, {}, options={"penalty": 0.02})
    assert (recipe.keep, recipe.options) == (None, {"initial": 0, "penalty": 0.02})
    assert make(str(tmp_path), None, {"options": "beta=0.5"}, options={"penalty": 0.02}).options == {
        "beta": 0.5,
        "penalty": 0.02,
    }
    for options in ({"options": "foo"}, {"options": 3}):
        with pytest.raises(UsageError, match=r"^--options (foo|'foo'|3)"):
            make(str(tmp_path), None, options, options={"penalty": 0.02})
    context = run.make_context("run", [str(tmp_path), "--lambda", "0.02"])
    assert context.params["penalty"] == 0.02


def test_the_methods_that_may_end_where_their_penalty_leaves_them_are_those_with_one() -> None:
    assert tuple(name for name, gate in GATES.items() if "penalty" in defaults(gate.make)) == PENALISED_METHODS


def choices(annotation: Any) -> str:
    """What a field chooses among, for the table; nothing where it takes any value."""
    kinds = [annotation, *get_args(annotation)]
    found: tuple[Any, ...] = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    return f": {', '.join(f'`{choice}`' for choice in found)}" if found else ""


def reference_table() -> str:
    """The recipe's reference in the README, made from the fields."""
    lines = ["| key, flag | default | what it says |", "|---|---|---|"]
    for name, field in Recipe.model_fields.items():
        default = "" if field.default in (None, (), {}) or field.is_required() else str(field.default)
        says = f"{field.description}{choices(field.annotation)}".replace("|", "/")
        lines.append(f"| `{name}` | {default.strip('()').rstrip(',')} | {says} |")
    return "\n".join(lines)


def test_the_readme_lists_every_key() -> None:
    assert reference_table() in README.read_text(), f"put this table into README.md:\n{reference_table()}"


def options(make: Callable[..., Any]) -> str:
    """The options of a method as the README writes them; a default that depends on other options is left out."""
    return ", ".join(
        f"`{name}`" if default is None else f"`{name}={f'{default:.4g}' if isinstance(default, float) else default}`"
        for name, default in defaults(make).items()
    )


def test_the_readme_lists_every_method_with_its_options() -> None:
    text = README.read_text().split("## Methods")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    made: dict[str, Callable[..., Any]] = {**{name: gate.make for name, gate in GATES.items()}, **SEARCHES}
    assert [(name, told) for name, _, told in rows] == [(f"`{name}`", options(make)) for name, make in made.items()]
    for shared in (schedule_options, pool_options, sample_options):
        assert options(shared) in " ".join(text.split()), f"put this under Methods in README.md: {options(shared)}"


def test_the_methods_of_a_recipe_are_those_that_there_are() -> None:
    """Their names stand twice, for a recipe must not load PyTorch."""
    assert get_args(Method) == METHODS
    assert tuple(SEARCHES) == SEARCH_METHODS
