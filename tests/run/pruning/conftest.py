"""Short runs under a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.results import Report
from tests.run.pruning.budget_runs import run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, for cost tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def pruned(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """The output folder of a run for 60% of the multiply-accumulates, and its report."""
    out = tmp_path_factory.mktemp("pruned") / "out"
    return out, run(inputs, out, macs="60%")
