"""A saved graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from graph_passes import save
from tests.graph_passes.saved_graph import model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    save(model(), path)
    return path
