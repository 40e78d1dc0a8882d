"""Gram matrices come back from their file as they were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor.selection.pruners.layerwise.gram import Gram
from compressor.selection.pruners.reconstruct.stored_grams import StoredGrams


def test_matrices_are_read_as_they_were_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grams = {
        "encoder.layer.0.output": Gram(rng.normal(size=(4, 4)), has_ones=False),
        "encoder.layer.1.output": Gram(rng.normal(size=(3, 3)), has_ones=True),
    }
    StoredGrams.write(tmp_path / "folder" / "grams.safetensors", grams)
    stored = StoredGrams(tmp_path / "folder" / "grams.safetensors")
    assert stored.keys() == grams.keys()
    for name, gram in grams.items():
        np.testing.assert_array_equal(stored[name].matrix, gram.matrix)
        assert stored[name].has_ones is gram.has_ones
    with pytest.raises(KeyError):
        stored["encoder.layer.2.output"]


@pytest.mark.parametrize("content", [None, b"", b'{"a', b"\xff" * 100])
def test_a_damaged_file_counts_as_none(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "grams.safetensors"
    if content is not None:
        path.write_bytes(content)
    assert StoredGrams.read(path) == {}


def test_a_file_that_was_cut_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "grams.safetensors"
    StoredGrams.write(path, {"linear": Gram(np.ones((4, 4)), has_ones=False)})
    assert set(StoredGrams.read(path)) == {"linear"}
    path.write_bytes(path.read_bytes()[:-8])
    assert StoredGrams.read(path) == {}
