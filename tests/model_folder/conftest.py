"""A model folder, and a copy of it to edit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import folders


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that must not be changed."""
    return folders.save(folders.bert(), tmp_path_factory.mktemp("models") / "good")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the folder."""
    return Path(shutil.copytree(saved, tmp_path / "model"))
