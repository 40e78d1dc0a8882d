"""A test module run by two processes at once, as `accelerate launch` starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_LAUNCH = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"


def launch(module: str, folder: Path) -> list[Any]:
    """What the main function of `module` left in `folder` as `rank0.json` and `rank1.json`, on the CPU."""
    done = subprocess.run(
        [sys.executable, *_LAUNCH.split(), "--dynamo_backend", "no", "-m", module, str(folder)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
