"""The weights beside a plan are read by name; a file that cannot be read is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from graph_passes import GraphErrorCode, PlanError, WeightFile

CONTENT: dict[str, np.ndarray] = {"b": np.ones((2, 3), np.float32), "a": np.zeros(4, np.float16)}


def test_parameters_are_read_by_name(tmp_path: Path) -> None:
    save_file(CONTENT, tmp_path / "model.safetensors")
    weights = WeightFile(tmp_path / "model.safetensors")
    assert list(weights) == ["a", "b"]
    assert all(np.array_equal(weights[name], content) for name, content in CONTENT.items())
    assert "c" not in weights
    with pytest.raises(KeyError):
        weights["c"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for code in (GraphErrorCode.FILE_MISSING, GraphErrorCode.FILE_UNREADABLE):
        with pytest.raises(PlanError) as error:
            len(WeightFile(path))
        assert (error.value.code, error.value.details["path"]) == (code, path)
        path.write_bytes(b"\x08")
