"""`compress kernel`: block-sparse attention, compiled for this machine."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.errors import UsageError


@click.command(short_help="Compile a kernel of block-sparse attention for this machine.")
@click.option("-o", "--out", default="block_sparse.so", type=click.Path(path_type=Path), help="The library to write.")
@click.option("--include", metavar="FOLDER", type=click.Path(path_type=Path), help="Where ONNX Runtime's headers are.")
@click.option("--march", default="native", help="The processor to compile for, in the compiler's words. [native]")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@common
@click.pass_obj
def kernel(view: Console, out: Path, include: Path | None, march: str, force: bool) -> None:
    """Compile the kernel that ONNX Runtime on the CPU can compute block-sparse attention with, and prove it.

    The compiler is what CXX names, else c++, g++ or clang++. run, build, bench and check take the library as --kernel.
    """
    if out.is_dir():
        raise UsageError(f"{out}: is a folder; name the file to write (-o)")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder; make it, or name another file (-o)")
    if out.exists() and not force:
        raise UsageError(f"{out}: is there already; add --force to replace it, or name another file (-o)")
    from compressor.targets.onnxruntime.cpu_kernel import compile_kernel

    with view.stage("compiling and proving the kernel"):
        error = compile_kernel(out, include, march)
    view.result(
        Text(f"{out}: equals the function of plain ONNX within {error:.1e} (relative); use it with --kernel {out}"),
        {"out": str(out), "error": error},
    )
