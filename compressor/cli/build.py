"""`compress build`: build the engine of a finished run for another runtime, or on the machine that will run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.cli.field_options import FieldsCommand, options_of
from compressor.config.run import BUILD_FIELDS, FIELDS

_FIELDS = {name: FIELDS[name] for name in BUILD_FIELDS}


@click.command(cls=FieldsCommand, fields=_FIELDS, short_help="Build the engine of a finished run here.")
@click.argument("out", type=click.Path(path_type=Path))
@options_of(_FIELDS)
@common
@click.pass_obj
def build(console: Console, out: Path, **flags: Any) -> None:
    """Build, prove, measure and report the engine of OUT, the folder of a run, which may come from another machine.

    A flag that is not given keeps the value of the run; with another target only --batch, --seq and --seconds are kept.
    The defaults in brackets are those of compress run. The engine and the report in OUT are replaced once every proof
    holds.
    """
    from compressor.cli.exit_status import finish
    from compressor.run.rebuild import rebuild

    fields = {name: value for name, value in flags.items() if value is not None}
    finish(console, rebuild(out, fields, console), out)
