"""`compress study`: many runs side by side, one table and figures at the end."""

from __future__ import annotations

from typing import Any

import click
import pydantic
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.cli.run import RunCommand, recipe_options
from compressor.config.run import Keep, Names, Place, Recipe, Share, flag_of, make
from compressor.errors import UsageError, nearest

_DECIDED = (
    *("plan", "method", "keep", "guarantee", "max_drop", "ray", "force"),
    *("blocks", "prune", "maps", "random_blocks", "everywhere", "entmax"),
)
"""Fields of a recipe that a study decides itself; a recipe's `ray` is for its own search, a flag for the study's."""
_AXES: dict[str, tuple[Any, str]] = {
    "methods": (str, "methods to compare"),
    "keeps": (Keep, "heads to keep: counts or shares"),
    "seeds": (pydantic.NonNegativeInt, "seeds to repeat with"),
    "budgets": (pydantic.NonNegativeFloat, "what heads may cost, in points of the metric"),
    "variants": (str, "variants of A*"),
    "penalties": (pydantic.NonNegativeFloat, "weights of the penalty"),
    "shares": (Share, "shares of the blocks to drop; 0: trained as long without masks"),
    "kinds": (
        str,
        "kinds of attention whose blocks go: bidirectional, causal, cross, bidirectional+causal, or all at once",
    ),
    "masks": (str, "where masks come from: own, random"),
    "grids": (str, "folders of finished grid studies, whose choices are timed"),
}


def _values(name: str, kind: Any, text: str) -> tuple[Any, ...]:
    try:
        parts = pydantic.TypeAdapter(Names).validate_python(text)
        found: tuple[Any, ...] = pydantic.TypeAdapter(tuple[kind, ...]).validate_python(parts)
    except pydantic.ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"{flag_of(name)} {text!r}: {said}; divide values by commas") from error
    if not found:
        raise UsageError(f"{flag_of(name)} {text!r}: names nothing; give values, divided by commas")
    return tuple(dict.fromkeys(found))


def _place(text: str | None) -> str | None:
    """Where `--ray` says."""
    try:
        return pydantic.TypeAdapter(Place | None).validate_python(text)
    except pydantic.ValidationError as error:
        raise UsageError(f"--ray {text!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


@click.command(cls=RunCommand, short_help="Many runs side by side: one table, and figures.")
@click.argument("kind", metavar="KIND")
@click.argument("model", required=False)
@click.option("--size", default="small", metavar="tiny|small|paper", help="how much of it [small]")
@click.option("--recipe", "file", metavar="FILE", help="a TOML file of the options of compress run; else MODEL's own")
@recipe_options
@common
@click.pass_obj
def study(view: Console, kind: str, model: str | None, size: str, file: str | None, **flags: Any) -> None:
    """Run a study of MODEL cell by cell into a folder; KIND is grid, astar, ablate, dynamics, penalty, importance,
    speed or blocks.

    A cell that is done is not run again: the same command goes on where an interrupted one stopped, and several
    processes started with the same command share the cells. The folder gets study.csv, study.html and figures/*.svg.
    """
    asked = {name: _values(name, _AXES[name][0], flags.pop(name)) for name in _AXES if flags[name] is not None}
    for name in _AXES:
        flags.pop(name, None)
    sources = flags.pop("data")
    given = {name: value for name, value in flags.items() if value is not None}
    if sources:
        given["data"] = sources[0]
    ray = _place(given.pop("ray", None))
    recipe = make(model, file, given, decided=_DECIDED)
    from compressor import studies as studies

    if size not in studies.SIZES:
        raise UsageError(f"--size {size}: unknown; {nearest(size, list(studies.SIZES))}")
    sources = tuple(sources) or ((recipe.data,) if recipe.data else ())
    request = studies.StudyRequest(recipe, studies.SIZES[size], sources, asked, ray)
    studies.check(kind, request)
    view.note(f"size {request.size}")
    found = studies.study(kind, request, view)
    tables: list[RenderableType] = []
    for shown in found.tables:
        table = Table(*shown.columns, title=shown.title, title_justify="left", box=None, pad_edge=False)
        for row in shown.rows:
            table.add_row(*(Text(value) for value in row))
        tables += [table, Text()]
    data = {"kind": kind, "size": str(request.size), "rows": [dict(row) for row in found.rows]}
    view.result(Group(*tables, *(Text(line) for line in found.told)), {**data, "told": list(found.told)})
    view.note(f"the figures and the whole table are in {recipe.out / 'study.html'}")


for _name, (_, _says) in _AXES.items():
    study.params.append(click.Option([flag_of(_name)], metavar=_name.upper(), help=f"{_says}, divided by commas"))
study.params = [option for option in study.params if option.name == "ray" or option.name not in _DECIDED]
for _option in study.params:
    if isinstance(_option, click.Option) and _option.name == "data":
        _option.multiple = True
        _option.help = f"{Recipe.model_fields['data'].description}; several to compare"
    if isinstance(_option, click.Option) and _option.name == "ray":
        _option.help = f"{Recipe.model_fields['ray'].description} (astar, ablate)"
