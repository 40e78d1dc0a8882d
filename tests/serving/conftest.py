"""The folder of a finished run, shared by the tests of serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.outputs import run_folder


@pytest.fixture(scope="session", autouse=True)
def _exports(shared_exports: None) -> None:
    """Runs share exports."""


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run; tests that change it copy it first."""
    return run_folder(tmp_path_factory.mktemp("serving") / "half")
