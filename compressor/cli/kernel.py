"""`compress kernel`: compile the kernel of block-sparse attention for this machine."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from compressor.cli.command_group import Command, common
from compressor.cli.console import Console
from compressor.cli.output_file import check_output_file


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
