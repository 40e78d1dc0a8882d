"""`compress` as a user runs it, but in this process: exit code, stdout, stderr."""

from __future__ import annotations

import json
import logging
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compressor.cli import main


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

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


def compress(capfd: pytest.CaptureFixture[str], *args: str | Path) -> Done:
    """Run one command."""
    capfd.readouterr()
    disabled = logging.root.manager.disable
    try:
        with pytest.raises(SystemExit) as exit_:
            main([str(arg) for arg in args])
    finally:
        logging.disable(disabled)
    return Done(int(exit_.value.code or 0), *capfd.readouterr())


def heed_ctrl_c() -> None:
    """For a process that a test interrupts: a shell that runs the tests in the background makes all that they start
    ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
