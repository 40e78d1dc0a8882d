"""`compress train`: train a language model with segment memory. Each field of `Training` is a flag."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from compressor.cli.commands import FieldsCommand, common, options_of
from compressor.cli.console import Console
from compressor.config.train import Training, training_of


@click.command(cls=FieldsCommand, short_help="Train a language model with memory.")
@click.argument("out")
@options_of(Training, without=("out",))
@common
@click.pass_obj
def train(console: Console, out: str, **fields: Any) -> None:
    """Train a language model that reads its text in segments with a memory, and write the model folder OUT.

    The same command resumes an interrupted training. A token is a word or a character of the text.
    """
    training = training_of(out=out, **fields)
    from compressor.results import Note, NoteCode
    from compressor.training.train import FILE_NAME
    from compressor.training.train import train as run

    result = run(training, console)
    summary = (
        f"{training.out}: {training.architecture} with {result.parameters / 1e6:.1f}M parameters"
        f" ({result.stack / 1e6:.1f}M without embeddings), {result.metric} {result.test:.4g} on the test text after"
        f" {training.steps} steps"
    )
    console.result(Text(summary), {"out": str(training.out), **asdict(result)})
    console.note(Note(text=f"the training curves are in {training.out / FILE_NAME}", code=NoteCode.FILE_WRITTEN))
