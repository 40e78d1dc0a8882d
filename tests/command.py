"""`compress` as a user runs it, but in this process: exit code, stdout, stderr."""

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
class Finished:
    """A command that has ended: exit code, output, and the error behind the exit code."""

    code: int
    out: str
    err: str
    cause: BaseException | None = None

    @property
    def error_code(self) -> str | None:
        """The `code` of the error; None where the command succeeded or its error has none."""
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


def compress(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> Finished:
    """Run one command."""
    capfd.readouterr()
    disabled = logging.root.manager.disable
    try:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
    finally:
        logging.disable(disabled)
    return Finished(int(exit_.value.code or 0), *capfd.readouterr(), exit_.value.__cause__)


def heed_ctrl_c() -> None:
    """Make a child process react to Ctrl-C, even if the tests run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
