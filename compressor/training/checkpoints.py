"""Finding an interrupted run again, and only that one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from compressor.errors import UsageError

_RUN = "run.json"
_STATE = "trainer_state.json"


def claim(folder: Path, settings: Mapping[str, Any], *, refuse_others: bool = False, memories: int = 0) -> str | None:
    """Make `folder` the place of the run that `settings` describe and find its newest checkpoint.

    A checkpoint of other settings is thrown away, or refused: going on from it would give what no single command gives.

    Args:
        memories: processes that each write their `memory_file`.

    Returns:
        The checkpoint to resume from, or None to start anew.

    Raises:
        UsageError: there is a checkpoint of other settings (`refuse_others`).
    """
    said = json.dumps(settings, indent=1, sort_keys=True, default=str)
    run = folder / _RUN
    if not run.exists() or (before := run.read_text(encoding="utf-8")) != said:
        if refuse_others and run.exists() and any(folder.glob("checkpoint-*")):
            raise UsageError(
                f"{folder}: the checkpoints are of another run ({_differences(json.loads(before), json.loads(said))});"
                " ask for the same, name another folder to write, or start anew (--force)"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run.write_text(said, encoding="utf-8")
    found = newest(folder, memories)
    return None if found is None else str(found)


def newest(folder: Path, memories: int = 0) -> Path | None:
    """The last whole checkpoint; one that was cut short is removed. `memories` as in `claim`."""
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        if _whole(checkpoint, memories):
            return checkpoint
        shutil.rmtree(checkpoint)
    return None


def memory_file(checkpoint: Path, process: int) -> Path:
    """What the streams of one process remember: each has streams of its own."""
    return checkpoint / f"memory_{process}.safetensors"


def digest(model: nn.Module) -> str:
    """`sha256:...` over every tensor of `model`: the same start is part of being the same run."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return f"sha256:{sha.hexdigest()}"


def _whole(checkpoint: Path, memories: int) -> bool:
    """Whether a checkpoint was written to its end: the state is the first process's last file, other processes write
    theirs beside it."""
    try:
        json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
        for process in range(memories):
            with safe_open(memory_file(checkpoint, process), "pt"):  # checks the file's size too
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return True


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], most: int = 3) -> str:
    """What two settings differ in, as far as it fits on a line: `layers 4, now 6`; the rows or the start if no word."""
    simple = [name for name in {**before, **now} if not isinstance(now.get(name), (dict, list))]
    told = [
        f"{name} {before.get(name)}, now {now.get(name)}" for name in simple if before.get(name) != now.get(name)
    ] or [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return "; ".join(told[:most])
