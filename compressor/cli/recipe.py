"""`compress recipe`: list the keys of a recipe, or the options of a method."""

from __future__ import annotations

import click
from rich.text import Text

from compressor.cli.command_group import Command, common
from compressor.cli.console import Console, text_table
from compressor.config.fields import reference_rows
from compressor.config.methods import METHODS
from compressor.config.recipe_file import FILE_NAME, json_schema
from compressor.config.run import FIELDS
from compressor.errors import ErrorCode, UsageError, suggestion


@click.command(cls=Command, short_help="List the keys of compress.toml.")
@click.option("--schema", is_flag=True, help=f"print the JSON schema of {FILE_NAME}")
@click.option("--options", "method", metavar="METHOD", help="list the options of a method instead")
@common
@click.pass_obj
def recipe(console: Console, schema: bool, method: str | None) -> None:
    """List every key of compress.toml, which is also a flag of compress run, with its default."""
    if method is not None:
        _print_options(console, method)
        return
    content = json_schema()
    if schema:
        click.echo(console.as_json(content))
        return
    table = text_table("key", "default", "description")
    for row in reference_rows(FIELDS):
        table.add_row(*(Text(cell.replace("`", "")) for cell in row))
    console.result(table, content)


def _print_options(console: Console, method: str) -> None:
    if method not in METHODS:
        raise UsageError(
            f"--options {method}: unknown method; {suggestion(method, list(METHODS))}",
            code=ErrorCode.UNKNOWN_NAME,
            field="options",
            value=method,
        )
    from compressor.selection.options import list_options, option_models

    table = text_table("option", "default", "description")
    options = list_options(*option_models(method))
    for option in options:
        table.add_row(option.name, option.assignment.partition("=")[2], Text(option.description))
    console.result(table, {option.name: option.default for option in options})
