"""`compress train`: a language model with segment memory, from scratch. Every flag is one field of `Training`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.cli.run import FieldsCommand, options_of
from compressor.config.train import Training, make


@click.command(cls=FieldsCommand, fields=Training.model_fields, short_help="Train a language model with memory.")
@click.argument("out")
@options_of(Training, without=("out",))
@common
@click.pass_obj
def train(view: Console, out: str, **flags: Any) -> None:
    """Train a language model that reads its text in segments with a memory, and write the model folder OUT.

    The same command goes on where an interrupted one stopped. The text's words, or its letters, become the tokenizer.
    """
    if flags["data"] is None:
        raise click.UsageError("Missing option '--data'.")
    recipe = make(out=out, **{name: value for name, value in flags.items() if value is not None})
    from compressor.training.train import FILE_NAME
    from compressor.training.train import train as run

    found = run(recipe, view)
    told = (
        f"{recipe.out}: {recipe.architecture} of {found.parameters / 1e6:.1f}M parameters ({found.stack / 1e6:.1f}M"
        f" without embeddings), {found.metric} {found.test:.4g} on the test text after {recipe.steps} steps"
    )
    view.result(Text(told), {"out": str(recipe.out), **asdict(found)})
    view.note(f"the curves are in {recipe.out / FILE_NAME}")
