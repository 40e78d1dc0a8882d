"""`compress export-triton`: a Triton model repository from the out folder of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from compressor.cli.comma_list import CommaList
from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.errors import UsageError

_FOLDER = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


class _Gpus(CommaList):
    """Ids of GPUs, divided by commas."""

    name = "gpus"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        words = super().convert(value, param, ctx)
        if not all(str(word).isdecimal() for word in words) or len(set(words)) < len(words):
            raise UsageError(f"--gpus {value!r}: give ids of GPUs, each once, divided by commas, e.g. 0,1")
        return tuple(int(word) for word in words)


@click.command("export-triton", short_help="A Triton model repository from an out folder.")
@click.argument("out", type=_FOLDER)
@click.option("-o", "--repository", required=True, metavar="REPOSITORY", type=_FOLDER, help="the repository's folder")
@click.option("--name", metavar="NAME", help="the model's name on the server; else that of OUT")
@click.option(
    "--backend",
    type=click.Choice(["onnxruntime", "tensorrt", "python"]),
    help="what runs it; else tensorrt where there is a plan, onnxruntime elsewhere",
)
@click.option("--plan", "plans", multiple=True, metavar="PLAN", type=_FOLDER, help="a plan built for another GPU")
@click.option("--plain", is_flag=True, help="serve model.onnx in place of the measured engine.onnx")
@click.option("--max-batch", type=_COUNT, help="rows of one batch; else the largest that was measured")
@click.option("--queue-delay", type=click.IntRange(min=0), default=100, help="microseconds to wait for a batch [100]")
@click.option("--instances", type=_COUNT, default=1, help="instances of the model, on each GPU or on the CPU [1]")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), help="where they run; else where OUT was measured")
@click.option("--gpus", type=_Gpus(), default=(), metavar="IDS", help="ids of GPUs, divided by commas; else all")
@click.option("--threads", type=_COUNT, help="threads of one call on the CPU; else the server's runtime decides")
@click.option("--data", metavar="DATA", help="rows to warm up with; else a sentence")
@click.option("--text-columns", type=CommaList(), default=(), metavar="COLUMNS", help="columns of their text")
@click.option("--storage-uri", metavar="URI", help="where the cluster finds the repository, for KServe")
@click.option("--runtime-version", metavar="TAG", help="image of Triton that KServe starts, e.g. 25.06-py3")
@click.option("--force", is_flag=True, help="replace the model if the repository has it")
@common
@click.pass_obj
def export_triton(view: Console, out: Path, **asked: Any) -> None:
    """Write a model of a Triton repository from OUT, the folder of a finished run, and a KServe YAML beside it."""
    from compressor import serving

    with view.stage("writing the model"):
        done = serving.export(serving.ServeRequest(out=out, **asked))
    for note in done.notes:
        view.note(note)
    batches = f"batches of up to {done.max_batch}" if done.max_batch else "no batches"
    told = f"{done.model}: {done.backend} on {done.device}, {batches}, {done.warmups} requests to warm up with"
    view.result(Text(told), {**asdict(done), "model": str(done.model), "service": str(done.service)})
    view.note(f"the KServe service is in {done.service}")
