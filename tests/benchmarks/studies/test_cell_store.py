"""The folder of a study: finished cells are read, and another study is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.cell_store import STAMP, Cell, CellStore
from compressor.errors import ErrorCode, UsageError
from compressor.progress import NullListener, ProgressCallback
from tests.faults import fails_with

RECIPE = {"kind": "blocks", "map_rows": 20, "weight_by_count": False}
CELL = Cell("a", {"share": 0.5})


def run_cell(cell: Cell, work: Path, tell: ProgressCallback) -> Mapping[str, Any]:
    raise AssertionError(f"{cell.name} is finished")


def test_a_finished_cell_is_not_run_again(tmp_path: Path) -> None:
    finished = {"cell": "a", "settings": {"share": 0.5}, "test": 0.75}
    (tmp_path / "cells").mkdir()
    (tmp_path / STAMP).write_text(json.dumps(RECIPE))
    (tmp_path / "cells" / "a.json").write_text(json.dumps(finished))
    folder = CellStore(tmp_path, RECIPE)
    folder.run([CELL], run_cell, NullListener())
    assert folder.results() == [finished]


@pytest.mark.parametrize("content", ['{"kind": "grid"}', "[]", "{", "7", "{}"])
def test_a_folder_of_another_study_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    (tmp_path / STAMP).write_text(content)
    with fails_with(ErrorCode.RUN_DIFFERS, UsageError, path=tmp_path):
        CellStore(tmp_path, RECIPE)
