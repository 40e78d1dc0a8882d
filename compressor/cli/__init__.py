"""The command line. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

import click

from compressor.cli.apply import apply
from compressor.cli.bench import bench
from compressor.cli.build import build
from compressor.cli.check import check
from compressor.cli.command_group import CommandGroup, common
from compressor.cli.console import Console
from compressor.cli.export_triton import export_triton
from compressor.cli.kernel import kernel
from compressor.cli.recipe import recipe
from compressor.cli.report import report
from compressor.cli.run import run
from compressor.cli.sites import sites
from compressor.cli.study import study
from compressor.cli.train import train
from compressor.errors import CompressorError, InputError


@click.group(cls=CommandGroup, default="run", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="compressor")
@common
def cli() -> None:
    """Make a transformer smaller and faster where it is deployed, and prove it.

    compress MODEL is short for compress run MODEL.
    """


for _verb in (run, sites, apply, build, bench, check, report, study, train, export_triton, kernel, recipe):
    cli.add_command(_verb)


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code: 0, or that of `compressor.errors`, or 130 for Ctrl-C."""
    view = Console()
    asked = list(sys.argv[1:] if args is None else args) or ["--help"]
    if "--debug" not in asked:
        _hush()
    try:
        cli.main(asked, prog_name="compress", obj=view, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone, as in `compress sites model | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:
        if view.debug:
            traceback.print_exc()
        text, code = explain(error)
        view.error(text)
    else:
        code = 0
    sys.exit(code)


def explain(error: Exception) -> tuple[str, int]:
    """What to say of an error, and the exit code."""
    match error:
        case click.UsageError():
            name = error.ctx.command_path if error.ctx else "compress"
            said = _no_such_option(error) if isinstance(error, click.NoSuchOption) else error.format_message()
            return f"{said} Try '{name} --help'.", 2
        case click.ClickException():
            return error.format_message(), error.exit_code
        case CompressorError():
            return str(error), error.exit_code
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}the disk is full; free some space and run the same command again", InputError.exit_code
        case OSError(filename=str() as name):
            return f"{name}: {error.strerror}; check the path and its permissions", InputError.exit_code
        case MemoryError():
            return "out of memory; give a smaller --batch or --batch-size, or a machine with more", InputError.exit_code
    # Imported here: the graph libraries take long to load, and every command would wait for them.
    from graph_passes.errors import GraphPassError

    if isinstance(error, GraphPassError):
        return str(error), InputError.exit_code
    return f"{type(error).__name__}: {error} (a fault of this program; --debug shows where)", 1


def _no_such_option(error: click.NoSuchOption) -> str:
    """click compares the dashes too, which every option has: `--bogus` is not near `--out`."""
    known = {name.lstrip("-"): name for name in error.possibilities or ()}
    near = difflib.get_close_matches(error.option_name.lstrip("-"), known, n=1)
    return f"no such option: {error.option_name}{f', did you mean {known[near[0]]}?' if near else '.'}"


def _hush() -> None:
    """Keep the libraries' warnings off the terminal: what a user must know is said by the command itself."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
