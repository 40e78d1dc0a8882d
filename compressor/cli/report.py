"""`compress report`: the page again, from the data of a finished run."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from compressor.cli.command_group import common
from compressor.cli.console import Console


@click.command(short_help="Rewrite report.html from report.json.")
@click.argument("out", type=click.Path(path_type=Path))
@common
@click.pass_obj
def report(view: Console, out: Path) -> None:
    """Rewrite the report.html of OUT, the folder of a finished run, from its report.json."""
    from compressor.report import load, summary, write

    found = load(out)
    page = write(found, out if out.is_dir() else out.parent)
    view.result(Text(found.verdict) if view.quiet else summary(found), found.model_dump(mode="json"))
    view.note(f"wrote {page}")
