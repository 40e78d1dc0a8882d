"""`compress run`: run a recipe. Each flag is made from one field of the recipe."""

from __future__ import annotations

from typing import Any

import click

from compressor.cli.command_group import CommandGroup, common
from compressor.cli.field_options import FieldsCommand, options_of
from compressor.config.ladder import compared_ladders, recipes_of
from compressor.config.methods import PENALISED_METHODS
from compressor.config.run import FIELDS
from compressor.errors import ErrorCode, UsageError, most_similar


@click.command(
    cls=FieldsCommand, fields=FIELDS, short_help="From a model folder to a smaller, proven, measured engine."
)
@click.argument("model", required=False)
@click.argument("words", nargs=-1, metavar="")
@click.option("--recipe", "file", metavar="FILE", help="a TOML file of these options; default: MODEL/compress.toml")
@options_of(FIELDS, without=("model",))
@click.option(
    *("--lambda", "penalty"),
    type=float,
    metavar="LAMBDA",
    help=f"short for --options penalty=LAMBDA, the penalty of an open head ({', '.join(PENALISED_METHODS)})",
)
@common
@click.pass_context
def run(
    ctx: click.Context, model: str | None, words: tuple[str, ...], file: str | None, penalty: float | None, **flags: Any
) -> None:
    """From a model folder to a smaller engine: select heads, shrink the graph, build, prove, measure.

    A recipe file sets the same fields as the flags below, under the same names; a flag wins.

    A budget with several values, such as --speedup 2,4,8, is a ladder: each rung starts from the one before and is a
    folder of its own inside the output folder, and frontier.html there shows metric against speed.
    """
    if words:
        raise click.UsageError(_unexpected(ctx, str(model)), ctx.parent)
    options = {} if penalty is None else {"penalty": penalty}
    fields = {name: value for name, value in flags.items() if value is not None}
    recipes = recipes_of(model, file, fields, options=options)
    recipe, console = recipes[0], ctx.obj
    method = recipe.selection.method
    if penalty is not None and method not in PENALISED_METHODS:
        raise UsageError(
            f"--lambda {penalty:g}: {method} has no penalty; omit it, or use --method {' or '.join(PENALISED_METHODS)}",
            code=ErrorCode.CONTRADICTION,
            field="lambda",
            method=method,
        )
    from compressor.cli.exit_status import finish, finish_ladder
    from compressor.run.ladder import compress_ladder
    from compressor.run.pipeline import compress

    others = compared_ladders(model, file, fields, recipes)
    if len(recipes) == 1:
        finish(console, compress(recipe, console), recipe.output.out)
    else:
        out = recipe.output.out.parent
        finish_ladder(console, compress_ladder(recipes, out, console, others=others), out)


def _unexpected(ctx: click.Context, word: str) -> str:
    """The message for a command line of several words: the first of them was most likely meant as a command."""
    group = ctx.parent.command if ctx.parent else None
    commands = group.list_commands(ctx) if isinstance(group, CommandGroup) else []
    if match := most_similar(word, commands):
        return f"unknown command {word}; did you mean {match}?"
    return f"unknown command {word}, and only one model folder is accepted; commands: {', '.join(commands)}."
