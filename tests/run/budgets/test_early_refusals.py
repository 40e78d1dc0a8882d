"""Folders and rows that a budget cannot use are refused before the graph is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compressor
from compressor.errors import CompressorError, ErrorCode, InputError, UsageError
from tests.faults import fails_with
from tests.run.budgets.budget_runs import budget_recipe
from tests.run.listeners import RecordingListener

DISTILL = {"distill": True, "distill_steps": 2}


@pytest.mark.parametrize(
    ("fields", "kind", "code", "field"),
    [
        ({"start_from": "nowhere"}, InputError, ErrorCode.FILE_MISSING, "start_from"),
        ({"start_from": "folder"}, InputError, ErrorCode.FILE_MISSING, "start_from"),
        ({"start_from": "file"}, InputError, ErrorCode.FILE_MISSING, "start_from"),
        ({**DISTILL, "teacher": "nowhere"}, InputError, ErrorCode.FILE_MISSING, "teacher"),
        ({**DISTILL, "teacher_outputs": "file"}, UsageError, ErrorCode.FILE_UNWRITABLE, "teacher_outputs"),
        ({**DISTILL, "teacher_outputs": "file/below"}, UsageError, ErrorCode.FILE_UNWRITABLE, "teacher_outputs"),
        ({"statistics": "file"}, UsageError, ErrorCode.FILE_UNWRITABLE, "statistics"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_by_its_flag(
    inputs: Path, tmp_path: Path, fields: dict[str, Any], kind: type[CompressorError], code: ErrorCode, field: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    paths = {name: tmp_path / value if isinstance(value, str) else value for name, value in fields.items()}
    listener = RecordingListener()
    with fails_with(code, kind, field=field) as caught:
        compressor.compress(budget_recipe(inputs, tmp_path / "out", macs="60%", **paths), listener)
    assert f"--{field.replace('_', '-')}" in str(caught.value)
    assert not any("exporting" in stage for stage in listener.stages)


def test_rows_of_which_none_can_be_held_out_are_refused(inputs: Path, tmp_path: Path) -> None:
    file = tmp_path / "few.tsv"
    file.write_text("label\ttext\n0\tbad\n1\tgood\n0\tbad film\n")
    rows, listener = {"data": str(file), "eval_data": str(inputs / "rows.tsv")}, RecordingListener()
    with fails_with(ErrorCode.TOO_FEW_ROWS, field="data", rows=3):
        compressor.compress(budget_recipe(inputs, tmp_path / "out", macs="60%", **rows), listener)
    assert not any("exporting" in stage for stage in listener.stages)
