"""Run a command in this process: exit code, stdout, stderr."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from compressor.cli import cli, main


@dataclass(frozen=True)
class CommandResult:
    """Result of a command: exit code, output, the error that caused the exit code, and the name of the command."""

    code: int
    out: str
    err: str
    cause: BaseException | None = None
    name: str = "compress"

    @property
    def error_code(self) -> str | None:
        """The `code` of the error; None if the command succeeded or its error has no code."""
        return getattr(self.cause, "code", None)

    @property
    def details(self) -> Mapping[str, Any]:
        """The `details` of the error."""
        return getattr(self.cause, "details", {})

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line on stderr."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith(f"{self.name}: ")
        return lines[0].removeprefix(f"{self.name}: ")


def compress(
    capfd: pytest.CaptureFixture[str], *arguments: str | Path, command: click.Command = cli, name: str = "compress"
) -> CommandResult:
    """Run `compress`, or another command that its `main` runs."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as raised:
        main([str(argument) for argument in arguments], command, name)
    return CommandResult(int(raised.value.code or 0), *capfd.readouterr(), raised.value.__cause__, name)


def enable_ctrl_c() -> None:
    """Make a child process react to Ctrl-C, which processes in the background of a shell ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
