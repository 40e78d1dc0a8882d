"""Peak memory of a graph in a runtime, measured in a process that does nothing else."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from compressor.targets.base import Feeds

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RUNS = 3


def peak_growth(
    module: str, path: Path, session: Mapping[str, Any], feeds: Feeds, *, on_gpu: bool = False
) -> int | None:
    """Bytes by which loading and running a graph grows the resident set of a fresh process at its peak.

    On a GPU: bytes by which the GPU's free memory shrinks, including simultaneous allocations of other processes.
    Memory that the process has before (interpreter, runtime, inputs) is not counted.

    Args:
        module: the module of a runtime whose `runner(path, session)` loads a graph.
        on_gpu: whether the session holds its memory on the GPU.

    Returns:
        The number of bytes; None where the system has no `/proc`, or the process failed.
    """
    if not _STATUS.exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "feeds.npz", allow_pickle=False, **feeds)
        arguments = {"module": module, "path": str(path), "session": dict(session), "on_gpu": on_gpu}
        request = json.dumps({**arguments, "feeds": f"{folder}/feeds.npz"})
        command = [sys.executable, "-W", "ignore", "-m", "compressor.targets.peak_memory", request]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(process.stdout) if process.returncode == 0 else None


def resident_bytes() -> int | None:
    """Bytes of memory that this process holds; None where the system has no `/proc`."""
    return 1024 * _kilobytes("VmRSS") if _STATUS.exists() else None


def reset_peak() -> int:
    """Forget the peak memory of this process, e.g. that of imports, and return the bytes that it holds now."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")
    return 1024 * _kilobytes("VmRSS")


def peak_bytes() -> int:
    """The most bytes of memory that this process has held since `reset_peak`."""
    return 1024 * _kilobytes("VmHWM")


def _measure(request: str) -> int:
    """Measure the growth in bytes; the fresh process runs this, see `peak_growth`."""
    from compressor.targets.cuda import driver

    arguments = json.loads(request)
    runtime = import_module(arguments["module"])
    with np.load(arguments["feeds"]) as archive:
        feeds = dict(archive)
    on_gpu = arguments["on_gpu"]
    before = driver().free_memory() if on_gpu else reset_peak()
    run = runtime.runner(Path(arguments["path"]), arguments["session"])
    for _ in range(_RUNS):
        run(feeds)
    if on_gpu:  # the runtime does not return device memory, so what is taken now was taken at the peak
        return max(0, before - driver().free_memory())
    return max(0, peak_bytes() - before)


def _kilobytes(field: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    print(_measure(sys.argv[1]))
