"""Finding an interrupted run again, and only that one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

_RUN = "run.json"
_STATE = "trainer_state.json"


def claim(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Make `folder` the place of the run that `settings` describe and find its newest checkpoint.

    A checkpoint of other settings is thrown away: going on from it would give a plan that no single command gives.

    Returns:
        The checkpoint to resume from, or None to start anew.
    """
    said = json.dumps(settings, indent=1, sort_keys=True, default=str)
    run = folder / _RUN
    if not run.exists() or run.read_text(encoding="utf-8") != said:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run.write_text(said, encoding="utf-8")
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        if _whole(checkpoint):
            return str(checkpoint)
        shutil.rmtree(checkpoint)
    return None


def digest(model: nn.Module) -> str:
    """`sha256:...` over every tensor of `model`: the same start is part of being the same run."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return f"sha256:{sha.hexdigest()}"


def _whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end: the trainer's state is the last of its files."""
    try:
        json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
