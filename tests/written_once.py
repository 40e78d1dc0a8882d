"""Folders that the first process of a pytest run writes, and that all of its processes read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

FOLDER = "COMPRESSOR_TEST_EXPORTS"
"""Environment variable with the folder that the processes of one pytest run have in common."""


def written_once(name: str, write: Callable[[Path], object]) -> Path:
    """The folder of a name, which `write` fills unless a process has done so; tests must not change it."""
    folder = Path(os.environ[FOLDER]) / name
    finished = folder.with_name(f"{name}.finished")
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_name(f"{name}.lock")):
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            write(folder)
            finished.touch()
    return folder
