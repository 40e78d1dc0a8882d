"""`compress recipe`: what a recipe may contain."""

from __future__ import annotations

import click
from rich.table import Table
from rich.text import Text

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.config.fields import reference_rows
from compressor.config.recipe_file import FILE_NAME, json_schema
from compressor.config.run import FIELDS


@click.command(short_help="List the keys of compress.toml.")
@click.option("--schema", is_flag=True, help=f"Print the JSON schema of {FILE_NAME}.")
@common
@click.pass_obj
def recipe(console: Console, schema: bool) -> None:
    """List every key of compress.toml, which is also a flag of compress run, with its default."""
    content = json_schema()
    if schema:
        click.echo(console.as_json(content))
        return
    table = Table("key", "default", "description", box=None, pad_edge=False)
    for row in reference_rows(FIELDS):
        table.add_row(*(Text(cell.replace("`", "")) for cell in row))
    console.result(table, content)
