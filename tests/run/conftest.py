"""Fixtures of the tests of runs: inputs, and one run with every stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import compressor
from compressor.results import Report
from tests.run.ladder_runs import Runs, fake_runs
from tests.run.listeners import RecordingListener
from tests.run.runs import learning_recipe


@pytest.fixture(scope="session", autouse=True)
def _exports(shared_exports: None) -> None:
    """Runs share exports."""


@dataclass(frozen=True)
class FinishedRun:
    """The output folder of a run, its report, and its listener."""

    out: Path
    report: Report
    listener: RecordingListener


@pytest.fixture(scope="session")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """One run that learned, proved, scored and timed, on all cores."""
    out = tmp_path_factory.mktemp("finished") / "out"
    listener = RecordingListener()
    return FinishedRun(
        out, compressor.compress(learning_recipe(inputs, out, max_drop=0.99, threads=None), listener), listener
    )


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Fakes in place of the runs of ladders; every file that they read or write has a later time than those before."""
    return fake_runs(tmp_path, monkeypatch)
