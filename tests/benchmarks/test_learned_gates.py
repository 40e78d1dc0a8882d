"""The runs of learned gates have valid recipes on every set."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learned_gates import CHOICES, REFERENCE, Cell, recipe_of
from benchmarks.text_sets import SETS


@pytest.mark.parametrize("name", SETS)
def test_runs_read_the_rows_of_their_set(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    rows = tmp_path / f"rows.{SETS[name].suffix}"
    rows.touch()
    for method in (REFERENCE, *CHOICES):
        assert recipe_of(Cell(method, 0.5, 20, 0), name, tmp_path).rows.data == str(rows)
