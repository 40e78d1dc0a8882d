"""`compress check`: check that a model is as fast as its baseline and computes the right outputs."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from compressor.cli.commands import FieldsCommand, common, options_of
from compressor.cli.console import Console
from compressor.config.check import CheckArtifacts, CheckRequest
from compressor.errors import ErrorCode, UsageError

_FIELDS = {**CheckRequest.model_fields, **CheckArtifacts.model_fields}


@click.command(cls=FieldsCommand, short_help="Check the latency of a served model or a graph against a baseline.")
@click.argument("path", required=False, metavar="[MODEL]")
@options_of(_FIELDS)
@common
@click.pass_obj
def check(console: Console, path: str | None = None, **fields: Any) -> None:
    """Compare a model's outputs, then its times, with a baseline's. Exit code 0: as fast; 7: slower; 5: wrong outputs.

    compress check --server grpc://localhost:8001 --model small --baseline dense --inputs rows.tsv --tokenizer out

    compress check small.onnx --baseline dense.onnx --max-slowdown 5% --p99 10ms

    compress check out/ --baseline dense/ --prompt-tokens 128

    compress check http://localhost:8000/v1/completions --baseline http://localhost:8001/v1/completions

    The last two compare the times to the first token, and per further token, of models that generate.
    """
    from compressor.latency import Verdict, check_and_record
    from compressor.latency import check as run_check

    if path is not None:
        _check_path(path, fields)
        fields["model"] = path
    files = CheckArtifacts(**{name: fields.pop(name) for name in CheckArtifacts.model_fields if name in fields})

    def show(verdict: Verdict) -> None:
        data = {**verdict.model_dump(mode="json"), "outcome": verdict.outcome.value, "passed": verdict.passed}
        console.result(Text("\n".join(verdict.lines())), data)

    title = f"{fields.get('model')} against {fields.get('baseline')}"
    check_and_record(files, title, lambda: run_check(CheckRequest(**fields), console), show)


def _check_path(path: str, fields: dict[str, Any]) -> None:
    """Make sure that the command names no model besides a file."""
    for name in ("model", "server"):
        if name in fields:
            raise UsageError(
                f"{path} --{name} {fields[name]}: name either a file, or a model with --server and --model",
                code=ErrorCode.CONTRADICTION,
                field=name,
                value=fields[name],
            )
