"""`compress export-triton`: write a model of a Triton repository from the folder of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.cli.field_options import FieldsCommand, option_of, options_of
from compressor.config.serve import ServeRequest

_FIELDS = ServeRequest.model_fields


@click.command(
    "export-triton", cls=FieldsCommand, fields=_FIELDS, short_help="Write a model of a Triton repository from a run."
)
@click.argument("out")
@click.option("-o", "--repository", metavar="REPOSITORY", help=f"{_FIELDS['repository'].description} [required]")
@option_of("engine", _FIELDS["engine"], multiple=True)
@options_of(_FIELDS, without=("out", "repository", "engine"))
@common
@click.pass_obj
def export_triton(console: Console, out: str, **flags: Any) -> None:
    """Write a model of a Triton repository from OUT, the folder of a finished run, and a KServe YAML beside it."""
    from compressor import serving

    request = ServeRequest(out=Path(out), **{name: value for name, value in flags.items() if value is not None})
    with console.stage("writing the model"):
        exported = serving.export(request)
    for note in exported.notes:
        console.note(note)
    batches = f"batches of up to {exported.max_batch}" if exported.max_batch else "no batches"
    text = f"{exported.model}: {exported.backend} on {exported.device}, {batches}, {exported.warmups} warm-up requests"
    data = {
        **asdict(exported),
        "model": str(exported.model),
        "service": str(exported.service),
        "notes": [note.model_dump(mode="json") for note in exported.notes],
    }
    console.result(Text(text), data)
    console.note(f"the KServe service is in {exported.service}")
