"""Gram matrices come back from their file as they were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from compressor.selection.pruners.layerwise.refit import Gram, StoredGrams, write_grams


def test_matrices_are_read_as_they_were_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grams = {
        "encoder.layer.0.output": Gram(rng.normal(size=(4, 4)), has_ones=False),
        "encoder.layer.1.output": Gram(rng.normal(size=(3, 3)), has_ones=True),
    }
    write_grams(grams, tmp_path / "grams")
    stored = StoredGrams(tmp_path / "grams")
    assert stored.keys() == grams.keys()
    for name, gram in grams.items():
        np.testing.assert_array_equal(stored[name].matrix, gram.matrix)
        assert stored[name].has_ones is gram.has_ones
    with pytest.raises(KeyError):
        stored["encoder.layer.2.output"]


@pytest.mark.parametrize("content", [b"", b'{"a', b"\xff" * 100])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "grams").write_bytes(content)
    with pytest.raises(SafetensorError):
        StoredGrams(tmp_path / "grams")


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "grams"
    write_grams({"linear": Gram(np.ones((4, 4)), has_ones=False)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(SafetensorError):
        StoredGrams(file)
