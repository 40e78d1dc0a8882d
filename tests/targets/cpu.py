"""What the CPU of this machine can do."""

from __future__ import annotations

from pathlib import Path

import pytest


def has_vnni() -> bool:
    """Whether sums of products of 8-bit integers are exact; without VNNI, runtimes use instructions that saturate."""
    try:
        return "vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


needs_vnni = pytest.mark.skipif(not has_vnni(), reason="runtimes saturate in int8 on a CPU without VNNI")
