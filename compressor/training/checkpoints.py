"""The checkpoints of a run: how an interrupted run is recognized and resumed."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from compressor import store
from compressor.errors import ErrorCode, UsageError

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"
_LISTED = 3
"""Maximum number of differences between two runs that a message names."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoint folder of a run.

    Attributes:
        folder: the folder; a run resumes its own checkpoints from there.
        settings: values that determine the run besides model, rows, schedule and gate, e.g. the options of a method;
            they can be written as JSON.
        refuse_others: raise an error if the folder has checkpoints of another run, instead of deleting them.
    """

    folder: Path
    settings: Mapping[str, Any]
    refuse_others: bool = False


def claim(
    folder: Path, settings: Mapping[str, Any], *, refuse_others: bool = False, memory_files: int = 0
) -> Path | None:
    """Assign `folder` to the run that `settings` describe and find its newest checkpoint.

    Checkpoints of another run are deleted or refused, because no single command reproduces a mixture of runs.

    Args:
        settings: everything that determines the run; it can be written as JSON.
        refuse_others: raise an error if the folder has checkpoints of another run.
        memory_files: number of processes that each write a `memory_file`.

    Returns:
        The checkpoint to resume, or None to start from the beginning.

    Raises:
        UsageError: the folder has checkpoints of another run (`refuse_others`).
    """
    key = json.loads(json.dumps(settings, default=str))
    former = store.begun_key(folder)
    if refuse_others and former != key and any(folder.glob("checkpoint-*")):
        raise _settings_differ_error(folder, former or {}, key)
    store.begin(folder, key)
    checkpoint = newest_checkpoint(folder, memory_files)
    if checkpoint is not None:
        logger.debug("resuming %s", checkpoint)
    return checkpoint


def newest_checkpoint(folder: Path, memory_files: int = 0) -> Path | None:
    """The last complete checkpoint of a folder; incomplete ones after it are deleted.

    Args:
        memory_files: number of processes that each write a `memory_file`.
    """
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        if _is_complete(checkpoint, memory_files):
            return checkpoint
        shutil.rmtree(checkpoint)
    return None


def memory_file(checkpoint: Path, process: int) -> Path:
    """The file with the segment memories of one process; each process reads streams of its own."""
    return checkpoint / f"memory_{process}.safetensors"


def digest(model: nn.Module) -> str:
    """`sha256:...` of the names and values of all tensors of a model, by which runs from different weights differ."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return f"sha256:{sha.hexdigest()}"


def _is_complete(checkpoint: Path, memory_files: int) -> bool:
    """Whether all files of a checkpoint were written.

    The trainer's state is the last file of the first process; the other processes write their memories independently.
    """
    try:
        json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
        for process in range(memory_files):
            with safe_open(memory_file(checkpoint, process), "pt"):  # also checks the size of the file
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return True


def _settings_differ_error(folder: Path, former: Mapping[str, Any], current: Mapping[str, Any]) -> UsageError:
    """The error for checkpoints of a run with other settings; it names what differs, single values first."""
    changed = [name for name in {**former, **current} if former.get(name) != current.get(name)]
    values = [name for name in changed if not isinstance(current.get(name), (dict, list))]
    listed = [f"{name} was {former.get(name)}, is {current.get(name)}" for name in values] or changed
    return UsageError(
        f"{folder}: the checkpoints are of another run ({'; '.join(listed[:_LISTED])}); repeat its settings, choose"
        " another output folder, or start from the beginning (--force)",
        code=ErrorCode.RUN_DIFFERS,
        path=folder,
        fields=tuple(changed),
    )
