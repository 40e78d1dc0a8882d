"""What the numbers were measured on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "compressor")

SAME = ("processor", "cores", "memory")
"""Of a machine: what has to be alike for two times to be compared."""


def machine() -> dict[str, str]:
    """Processor, cores, memory, system, and the versions of what was used."""
    return {
        "processor": _processor(),
        "cores": f"{psutil.cpu_count(logical=False) or '?'} ({psutil.cpu_count()} threads)",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
