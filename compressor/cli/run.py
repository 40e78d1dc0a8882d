"""`compress run`: every flag is one field of the recipe, made from it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.config.run import Recipe, flag_of, group_of, make

F = TypeVar("F", bound=Callable[..., Any])
_OTHER = "Common"
_VERBS = ("run", "sites", "apply", "build", "bench", "check", "report", "study", "train", "export-triton")


class FieldsCommand(click.Command):
    """Lists its options under the headings of the fields that they set."""

    def __init__(self, *args: Any, fields: Mapping[str, FieldInfo] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.fields = fields or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            field = self.fields.get(str(option.name))
            record = option.get_help_record(ctx)
            if record and isinstance(option, click.Option):
                rows.setdefault(group_of(field) if field else _OTHER, []).append(record)
        for heading, records in sorted(rows.items(), key=lambda row: row[0] == _OTHER):
            with formatter.section(heading):
                formatter.write_dl(records)


class RunCommand(FieldsCommand):
    """Lists its options under the headings of the recipe's fields."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, fields=Recipe.model_fields, **more)


def options_of(config: type[BaseModel], *, without: Collection[str]) -> Callable[[F], F]:
    """One option a field of a configuration, but for the arguments `without`."""

    def decorate(command: F) -> F:
        for name, field in reversed(config.model_fields.items()):
            if name not in without:
                command = _option(name, field)(command)
        return command

    return decorate


def recipe_options(command: F) -> F:
    """One option a field of the recipe, but for the model, which is the argument."""
    return options_of(Recipe, without=("model",))(command)


def _option(name: str, field: FieldInfo) -> Callable[[F], F]:
    flags = [*(["-o"] if name == "out" else []), flag_of(name)]
    default = field.get_default()
    says = f"{field.description}" + (
        f" [{_shown(default)}]" if default not in (None, PydanticUndefined, False, (), {}) else ""
    )
    if field.annotation is bool:
        return click.option(f"{flag_of(name)}/{flag_of(f'no_{name}')}", name, default=None, help=says)
    return click.option(*flags, name, metavar=_metavar(name, field.annotation), help=says)


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _metavar(name: str, annotation: Any) -> str:
    if get_origin(annotation) is dict:
        return "NAME=VALUE,..."
    kinds = [annotation, *get_args(annotation)]
    choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), None)
    return "|".join(map(str, choices)) if choices else name.split("_")[-1].upper()


@click.command(cls=RunCommand, short_help="From a model folder to a smaller, proven and measured engine.")
@click.argument("model", required=False)
@click.argument("more", nargs=-1, metavar="")
@click.option("--recipe", "file", metavar="FILE", help="a TOML file of the options below; else MODEL/compress.toml")
@recipe_options
@click.option("--lambda", "penalty", type=float, help="short for --options penalty=LAMBDA, what an open head costs")
@common
@click.pass_obj
def run(
    view: Console, model: str | None, more: tuple[str, ...], file: str | None, penalty: float | None, **flags: Any
) -> None:
    """From a model folder to a smaller engine: learn which heads to drop, shrink the graph, build, prove, measure.

    A recipe file holds everything that a flag below can say, under the same names; a flag wins.
    """
    if more:
        near = difflib.get_close_matches(str(model), _VERBS, n=1)
        raise click.UsageError(
            f"{model} is no verb, did you mean {near[0]}?"
            if near
            else f"{model} is no verb, nor can two model folders be given; the verbs are {', '.join(_VERBS)}."
        )
    options = {} if penalty is None else {"penalty": penalty}
    recipe = make(model, file, {name: value for name, value in flags.items() if value is not None}, options=options)
    from compressor.cli.exit_status import finish
    from compressor.run.pipeline import compress

    finish(view, compress(recipe, view), recipe.out)
