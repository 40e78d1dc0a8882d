"""The processor cores that runtimes may use."""

from __future__ import annotations

import os

import psutil


def usable_cores() -> int:
    """Physical cores that this process may run on; runtimes gain nothing from a second thread per core."""
    try:
        logical = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        logical = os.cpu_count() or 1
    return max(1, min(logical, psutil.cpu_count(logical=False) or logical))
