"""Describe the machine that prints a table, in one line."""

from __future__ import annotations

import os
import platform

import psutil

from compressor.environment import package_version, processor


def machine(*packages: str) -> str:
    """Processor, cores, memory, load, and the versions of Python and of `packages`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [
        processor(),
        f"{cores} cores",
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        f"load {os.getloadavg()[0]:.1f}",
        f"Python {platform.python_version()}",
        *(f"{name} {package_version(name) or 'not installed'}" for name in packages),
    ]
    return ", ".join(parts)
