"""`compress report`: render the page of a finished run again from its data."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from compressor.cli.command_group import Command, common
from compressor.cli.console import Console


@click.command(cls=Command, short_help="Rewrite report.html from report.json.")
@click.argument("out", type=click.Path(path_type=Path))
@common
@click.pass_obj
def report(console: Console, out: Path) -> None:
    """Rewrite the report.html of OUT, the folder of a finished run, from its report.json.

    OUT may also be the path of another report, such as out/run-report.json; its page is then run-report.html.
    """
    from compressor.report import load, summary, write_page

    content = load(out)
    page = write_page(content, out / "report.html" if out.is_dir() else out.with_suffix(".html"))
    console.result(Text(content.verdict) if console.quiet else summary(content), content.model_dump(mode="json"))
    console.note(f"wrote {page}")
