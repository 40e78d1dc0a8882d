"""Time to load an engine of OpenVINO: compiled, and read from the cache of compiled models.

    python benchmarks/load_time.py out/engine.xml

Each load runs in a fresh process and is timed without the imports; the cache is a temporary folder.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

_LOADS = 5
_LOAD = """
import sys, time
from pathlib import Path
from compressor.targets.openvino.engine import load_engine
start = time.perf_counter()
load_engine(Path(sys.argv[1]))
print(time.perf_counter() - start)
"""


def load_seconds(engine: str, cache: str) -> float:
    """Seconds to load an engine in a fresh process.

    Args:
        engine: the engine, `.xml`.
        cache: the user's cache folder.
    """
    command = [sys.executable, "-W", "ignore", "-c", _LOAD, engine]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main(engine: str) -> None:
    """Print the median of both times."""
    first, later = [], []
    for _ in range(_LOADS):
        with tempfile.TemporaryDirectory() as cache:
            first.append(load_seconds(engine, cache))
            later.append(load_seconds(engine, cache))
    print(f"{engine}: compiled {statistics.median(first):.2f} s, from the cache {statistics.median(later):.2f} s")


if __name__ == "__main__":
    main(sys.argv[1])
