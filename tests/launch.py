"""A module of the tests run by two processes at once, as `accelerate launch` starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_LAUNCH = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
_SECONDS = 600
"""Time for both processes to end."""


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start two processes on the CPU; the first argument is the name of their module."""
    return subprocess.Popen(
        [sys.executable, *_LAUNCH.split(), "--dynamo_backend", "no", "-m", *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(launched: subprocess.Popen[str]) -> None:
    """Wait until both processes have ended without an error."""
    try:
        _, output = launched.communicate(timeout=_SECONDS)
    finally:
        launched.terminate()
    assert launched.returncode == 0, output[-3000:]


def launch(module: str, folder: Path) -> list[Any]:
    """The contents of `rank0.json` and `rank1.json`, which the main function of `module` writes into `folder`."""
    finish(start(module, str(folder)))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
