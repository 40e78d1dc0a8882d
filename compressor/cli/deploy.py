"""Commands for a machine that serves an engine: `compress export-triton` and `compress kernel`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from compressor.cli.commands import Command, FieldsCommand, check_output_file, common, option_of, options_of
from compressor.cli.console import Console
from compressor.config.request import ServeRequest

_FIELDS = ServeRequest.model_fields


@click.command("export-triton", cls=FieldsCommand, short_help="Write a model of a Triton repository from a run.")
@click.argument("out")
@click.option("-o", "--repository", metavar="REPOSITORY", help=f"{_FIELDS['repository'].description} [required]")
@option_of("engine", _FIELDS["engine"], multiple=True)
@options_of(_FIELDS, without=("out", "repository", "engine"))
@common
@click.pass_obj
def export_triton(console: Console, out: str, **fields: Any) -> None:
    """Write a model of a Triton repository from OUT, the folder of a finished run, and a KServe YAML beside it."""
    from compressor import serving

    request = ServeRequest(out=Path(out), **fields)
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


@click.command(cls=Command, short_help="Compile a kernel of block-sparse attention for this machine.")
@click.option(
    "-o",
    "--out",
    default="block_sparse.so",
    type=click.Path(path_type=Path),
    help="the library to write [block_sparse.so]",
)
@click.option("--include", metavar="FOLDER", type=click.Path(path_type=Path), help="folder of ONNX Runtime's headers")
@click.option("--march", default="native", help="processor to compile for, a value of the compiler's -march [native]")
@click.option("--force", is_flag=True, help="replace the file if it exists")
@common
@click.pass_obj
def kernel(console: Console, out: Path, include: Path | None, march: str, force: bool) -> None:
    """Compile and prove a kernel that computes block-sparse attention in ONNX Runtime on the CPU.

    The compiler is the value of CXX, else c++, g++ or clang++. The commands run, build, bench and check take the
    library as --kernel.
    """
    check_output_file(out, force=force)
    from compressor.targets.onnxruntime.cpu_kernel import compile_kernel

    with console.stage("compiling and proving the kernel"):
        error = compile_kernel(out, include, march)
    text = f"{out}: equals the plain ONNX function within {error:.1e} (relative); use it with --kernel {out}"
    console.result(Text(text), {"out": str(out), "error": error})
