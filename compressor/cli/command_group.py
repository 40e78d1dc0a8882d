"""The command `compress`: `run` where no verb is named, and the common flags before or after any verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click_default_group import DefaultGroup

from compressor.cli.console import Console

F = TypeVar("F", bound=Callable[..., Any])

_COMMON = {
    "quiet": "No progress and no notes, only results and errors.",
    "debug": "Show the traceback of an error, and the warnings of the libraries.",
    "json": "Results as JSON on stdout.",
}


class Interrupted(click.ClickException):
    """Ctrl-C."""

    exit_code = 130


class CommandGroup(DefaultGroup):
    """Turns Ctrl-C into an error like any other, so that it too is one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(str(interrupt) or "interrupted") from interrupt


def common(command: F) -> F:
    """Add `--quiet`, `--debug` and `--json`; they are noted in the command's `Console`."""
    for name, says in reversed(_COMMON.items()):
        command = click.option(f"--{name}", is_flag=True, expose_value=False, callback=_noted, help=says)(command)
    return command


def _noted(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        setattr(ctx.ensure_object(Console), str(option.name), True)
