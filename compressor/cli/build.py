"""`compress build`: the engine of a finished run, for another runtime or on the machine that it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.cli.run import FieldsCommand, options_of
from compressor.config.run import OF_BUILDING, Recipe


class _BuildCommand(FieldsCommand):
    """Lists its options under the headings of the recipe's fields."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, fields=Recipe.model_fields, **more)


@click.command(cls=_BuildCommand, short_help="Build the engine of a finished run here.")
@click.argument("out", type=click.Path(path_type=Path))
@options_of(Recipe, without=tuple(name for name in Recipe.model_fields if name not in OF_BUILDING))
@common
@click.pass_obj
def build(view: Console, out: Path, **flags: Any) -> None:
    """Build the engine of OUT, the folder of a run, which may come from another machine: prove, measure and report it.

    What no flag says is as it was in the run. The engine and the report in OUT are replaced once all proofs hold.
    """
    from compressor.cli.exit_status import finish
    from compressor.run.rebuild import rebuild

    asked = {name: value for name, value in flags.items() if value is not None}
    finish(view, rebuild(out, asked, view), out)
