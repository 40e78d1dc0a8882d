"""Processes with the bindings of one version of TensorRT, its libraries and the driver of a GPU replaced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
BINDINGS = Path(os.environ.get("TENSORRT_BINDINGS", ROOT / ".venv" / "tensorrt"))
"""A folder for each version, with the package `tensorrt_bindings`; `make test` fills it."""


class RunProbe(Protocol):
    """Runs a module of this package in a process with the bindings of a version, and returns what it prints as JSON."""

    def __call__(self, module: str, version: str, *args: str | Path) -> dict[str, Any]: ...


@pytest.fixture(scope="package")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for TensorRT's libraries and for the driver of a GPU."""
    folder = tmp_path_factory.mktemp("libraries")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler, so no stand-ins for TensorRT's libraries")
    library = folder / "libraries.so"
    subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", library, HERE / "libraries.c"], check=True)
    names = [
        f"lib{name}.so.{n}" for name in ("nvinfer", "nvonnxparser", "nvinfer_plugin", "nvparsers") for n in (8, 10, 11)
    ]
    for name in (*names, "libcuda.so.1"):
        shutil.copy(library, folder / name)
    return folder


@pytest.fixture(scope="package")
def run_probe(libraries: Path) -> RunProbe:
    """Skips where the bindings of the version, or polygraphy, are not installed."""

    def run(module: str, version: str, *args: str | Path) -> dict[str, Any]:
        bindings = BINDINGS / version
        if not (bindings / "tensorrt_bindings").is_dir():
            pytest.skip(f"no bindings of TensorRT {version} in {BINDINGS}")
        pytest.importorskip("polygraphy")
        paths = {"LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": os.pathsep.join([str(bindings), str(ROOT)])}
        command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.{module}", *map(str, args)]
        process = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        printed: dict[str, Any] = json.loads(process.stdout)
        return printed

    return run
