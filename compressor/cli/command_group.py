"""The group of all commands. `run` is the default command; common flags stand before or after any command."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from click_default_group import DefaultGroup

from compressor.cli.console import Console

F = TypeVar("F", bound=Callable[..., Any])

_COMMON = {
    "quiet": "print results and errors only, no progress and no notes",
    "debug": "show the traceback of an error, and warnings of libraries",
    "json": "print results as JSON on stdout",
}


class Interrupted(click.ClickException):
    """Ctrl-C."""

    exit_code = 130


@contextmanager
def _broken_pipe_raised() -> Iterator[None]:
    """Raise BrokenPipeError without its number, by which click would recognize it and exit with code 1."""
    try:
        yield
    except BrokenPipeError as error:
        raise BrokenPipeError from error


class Command(click.Command):
    """A command that takes no flag as the value of another: `--data --distill` lacks a value.

    It reports Ctrl-C, and a reader of the output that has gone, like any other error.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _broken_pipe_raised():  # by --help, which is printed here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _broken_pipe_raised():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(str(interrupt) or "interrupted") from interrupt

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            self._require_values(ctx, list(itertools.takewhile(lambda word: word != "--", args)))
        return super().parse_args(ctx, args)

    def _require_values(self, ctx: click.Context, words: Sequence[str]) -> None:
        """Raise BadOptionUsage for an option that another one follows in place of its value."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
        with_value = {flag for option in options if not option.is_flag for flag in option.opts}
        for flag, word in itertools.pairwise(words):
            following = word.partition("=")[0]
            if flag in with_value and following in flags:
                raise click.BadOptionUsage(flag, f"Option {flag!r} needs a value, and {following!r} is an option.", ctx)


class CommandGroup(Command, DefaultGroup):
    """The group of commands, in the order in which they are added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def common(command: F) -> F:
    """Add `--quiet`, `--debug` and `--json`, which set the attributes of the command's `Console`."""
    for name, text in reversed(_COMMON.items()):
        command = click.option(f"--{name}", is_flag=True, expose_value=False, callback=_set_on_console, help=text)(
            command
        )
    return command


def _set_on_console(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        setattr(ctx.ensure_object(Console), str(option.name), True)
