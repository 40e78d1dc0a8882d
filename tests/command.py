"""Run `compress` in this process: exit code, stdout, stderr."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compressor.cli import main


@dataclass(frozen=True)
class CommandResult:
    """Result of a command: exit code, output, and the error that caused the exit code."""

    code: int
    out: str
    err: str
    cause: BaseException | None = None

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
        assert lines[0].startswith("compress: ")
        return lines[0].removeprefix("compress: ")


def compress(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> CommandResult:
    """Run one command."""
    capfd.readouterr()
    disabled = logging.root.manager.disable
    try:
        with pytest.raises(SystemExit) as raised:
            main([str(argument) for argument in arguments])
    finally:
        logging.disable(disabled)
    return CommandResult(int(raised.value.code or 0), *capfd.readouterr(), raised.value.__cause__)


def enable_ctrl_c() -> None:
    """Make a child process react to Ctrl-C, which processes in the background of a shell ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
