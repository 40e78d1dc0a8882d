"""The command line of click. Heavy libraries are imported only by the commands that need them."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import click

from compressor.cli.apply import apply
from compressor.cli.bench import bench
from compressor.cli.check import check
from compressor.cli.commands import HELP_ALL, CommandGroup, FieldsCommand, common
from compressor.cli.console import Console
from compressor.cli.deploy import export_triton, kernel
from compressor.cli.language_models import generate, train
from compressor.cli.run import build, explain, recipe, report, run
from compressor.cli.sites import costs, sites
from compressor.config.tasks import error_of_own_task
from compressor.errors import CompressorError, InputError, most_similar


@click.group(
    cls=CommandGroup, default="run", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="compressor")
@common
def cli() -> None:
    """Prune, distill and quantize a transformer for the machine that serves it, and prove and measure the result.

    compress MODEL is short for compress run MODEL, whose options compress run --help lists.
    """


for _command in (
    *(run, explain, sites, costs, apply, build, bench, check, report, generate, train),
    *(export_triton, kernel, recipe),
):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None, command: click.Command = cli, name: str = "compress") -> None:
    """Run a command and exit with 0, a code of `compressor.errors`, 130 after Ctrl-C, or 141 after a broken pipe.

    Args:
        arguments: arguments after the name of the command; None: those of the process.
        command: the command, by default the group of all commands.
        name: how users call the command, for messages.

    Raises:
        SystemExit: always, caused by the error of the command if there is one.
    """
    console = Console(name=name)
    command_arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    silence = nullcontext() if "--debug" in command_arguments else _silent_libraries()
    try:
        with silence:
            command.main(command_arguments, prog_name=name, obj=console, standalone_mode=False)
            sys.stdout.flush()
    except BrokenPipeError as error:
        # The reader of the output has gone, as in `compress sites model | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from error
    except (Exception, SystemExit) as error:
        if console.debug:
            traceback.print_exc()
        error = _explained(error)
        message, code = message_of(error)
        console.error(message)
        raise SystemExit(code) from error
    raise SystemExit(0)


def message_of(error: Exception | SystemExit) -> tuple[str, int]:
    """The line that the terminal shows for an error, and the exit code.

    Raises:
        SystemExit: `error`, unless a custom task raised it.
    """
    match error:
        case click.UsageError():
            message, flag = error.format_message(), "--help"
            if isinstance(error, click.NoSuchOption):
                command = error.ctx.command if error.ctx else None
                message = _unknown_option(error)
                flag = HELP_ALL if isinstance(command, FieldsCommand) and not command.is_short else flag
            return f"{message} Try '{error.ctx.command_path if error.ctx else 'compress'} {flag}'.", 2
        case click.ClickException():
            return error.format_message(), error.exit_code
        case CompressorError():
            return str(error), error.exit_code
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            path = f"{error.filename}: " if error.filename else ""
            return f"{path}the disk is full; free some space and run the same command again", InputError.exit_code
        case OSError(filename=str() as name):
            return f"{name}: {error.strerror}; check the path and its permissions", InputError.exit_code
        case MemoryError() | RuntimeError() if isinstance(error, MemoryError) or _is_out_of_memory(error):
            return "out of memory; use a smaller --batch or --batch-size, or a larger machine", InputError.exit_code
    # Imported here: the graph libraries take long to load, and every command would wait for them.
    from graph_passes.errors import GraphPassError

    if isinstance(error, GraphPassError):
        return str(error), InputError.exit_code
    if (task_error := error_of_own_task(error)) is not None:
        return str(task_error), task_error.exit_code
    if isinstance(error, SystemExit):
        raise error
    return f"{type(error).__name__}: {error} (internal error; please report it with the output of --debug)", 1


def _explained(error: Exception | SystemExit) -> Exception | SystemExit:
    """The error of a missing PyTorch in place of the import that failed; any other error as it is."""
    if not isinstance(error, ModuleNotFoundError):
        return error
    from compressor.environment import missing_pytorch

    return missing_pytorch(error) or error


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch lacked memory, on the processor or on a GPU."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _unknown_option(error: click.NoSuchOption) -> str:
    """The message for an unknown option, with the most similar option.

    click's suggestions compare the leading dashes of all options too, so that `--bogus` resembles `--out`.
    """
    options = {name.lstrip("-"): name for name in error.possibilities or ()}
    match = most_similar(error.option_name.lstrip("-"), list(options))
    return f"no such option: {error.option_name}{f', did you mean {options[match]}?' if match else '.'}"


@contextmanager
def _silent_libraries() -> Iterator[None]:
    """Keep the libraries' warnings off the terminal, since the command prints everything that a user must know."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
