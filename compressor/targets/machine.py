"""Resources of this machine for runtimes: processor cores, and a folder in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time that a container may use in a period, and the length of the period: `200000
100000`."""


def usable_cores() -> int:
    """Physical cores that this process may use; a second thread per core makes runtimes no faster."""
    try:
        logical = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        logical = os.cpu_count() or 1
    return max(1, min(logical, _physical_cores() or logical, _quota() or logical))


def _physical_cores() -> int | None:
    """Physical cores of the machine; None: unknown, as on a server of models, which lacks psutil."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil.cpu_count(logical=False)


def _quota() -> int | None:
    """Cores that the quota of a container allows, rounded down; None: there is no quota."""
    try:
        time, period = _QUOTA.read_text().split()
        return max(1, int(time) // int(period))
    except (OSError, ValueError):  # no such file, or no limit: `max 100000`
        return None


def user_cache() -> Path:
    """The folder `compressor` in the user's cache; it may not exist."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "compressor"
