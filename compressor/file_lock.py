"""Locks between processes, on files and folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def file_lock(path: Path, *, wait: bool = True, create: bool = False) -> Iterator[None]:
    """Lock a file or a folder against other processes. The lock ends with the context, or with the process.

    Args:
        path: a folder, or a file, whose content stays.
        wait: wait while another process holds the lock.
        create: create the file where it is missing.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
        OSError: the path cannot be opened, or lies on a share without locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)
