"""Peak memory of a graph in ONNX Runtime, measured where nothing else is: in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compressor.targets.base import Feeds

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RUNS = 3


def peak_growth(path: Path, session: Mapping[str, Any], feeds: Feeds) -> int | None:
    """By how many bytes loading and running a graph grows the resident set of a fresh process, at its peak; on CUDA by
    how many the GPU's free memory shrinks, whoever else uses it.

    What the process holds before (interpreter, runtime, inputs) is not counted.

    Returns:
        Bytes, or None where the system does not tell (no `/proc`) or the process did not live.
    """
    if not _STATUS.exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "feeds.npz", allow_pickle=False, **feeds)
        request = json.dumps({"path": str(path), "session": dict(session), "feeds": f"{folder}/feeds.npz"})
        command = [sys.executable, "-W", "ignore", "-m", "compressor.targets.peak_memory", request]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None


def _child(request: str) -> int:
    from compressor.targets.cuda import driver
    from compressor.targets.onnxruntime.ort_session import PROVIDERS, open_session, run

    asked = json.loads(request)
    with np.load(asked["feeds"]) as archive:
        feeds = dict(archive)
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")  # sets the peak back to what is held now: imports have peaks too
    on_gpu = asked["session"]["provider"] == PROVIDERS["cuda"]
    before = driver().free_memory() if on_gpu else _kilobytes("VmRSS")
    engine = open_session(Path(asked["path"]), asked["session"])
    for _ in range(_RUNS):
        run(engine, feeds)
    if on_gpu:  # ONNX Runtime keeps what it has taken once
        return max(0, before - driver().free_memory())
    return max(0, _kilobytes("VmHWM") - before) * 1024


def _kilobytes(field: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    print(_child(sys.argv[1]))
