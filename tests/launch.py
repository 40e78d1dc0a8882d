"""A test module run by two processes at once, as `accelerate launch` starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_LAUNCH = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"


def start(*words: str) -> subprocess.Popen[str]:
    """Two processes of a module, its name the first of `words`, on the CPU."""
    return subprocess.Popen(
        [sys.executable, *_LAUNCH.split(), "--dynamo_backend", "no", "-m", *words],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(running: subprocess.Popen[str]) -> None:
    """Wait until both have ended well."""
    try:
        _, said = running.communicate(timeout=600)
    finally:
        running.terminate()
    assert running.returncode == 0, said[-3000:]


def launch(module: str, folder: Path) -> list[Any]:
    """What the main function of `module` left in `folder` as `rank0.json` and `rank1.json`."""
    finish(start(module, str(folder)))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
