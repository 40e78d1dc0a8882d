"""Studies resume after an interruption, and processes share their cells."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.cell_store import Cell, CellStore
from benchmarks.studies.context import StudyContext
from benchmarks.studies.run import study
from compressor.progress import ProgressCallback
from tests.benchmarks.studies.requests import AXES, StageRecorder, interrupt, request_of, table


@pytest.mark.zoo
def test_a_grid_resumes_after_an_interruption(inputs: Path, finished: Callable[[str], Path], tmp_path: Path) -> None:
    methods = ("ste", "taylor")
    request = request_of(inputs, tmp_path / "grid", axes={**AXES["grid"], "methods": methods})
    first = StageRecorder("taylor-k4", interrupt)
    with pytest.raises(KeyboardInterrupt, match=re.escape(str(tmp_path / "grid"))):
        study("grid", request, first)
    second = StageRecorder()
    study("grid", request, second)
    assert [name for name in first.names + second.names if name.count("-s") == 1].count("taylor-k4-s1") == 2
    assert not {*first.names} & {*second.names} - {"taylor-k4-s1", "loading the model and the rows"}
    expected = [row for row in table(finished("grid")) if row["method"] in ("dense", *methods)]
    assert table(tmp_path / "grid") == expected
    third = StageRecorder()
    study("grid", request, third)
    assert third.names == ["loading the model and the rows", "writing the findings"]


@pytest.mark.parametrize(
    ("kind", "axes", "options", "stage", "after", "remaining_files"),
    [
        ("grid", {"methods": ("dsp",), "keeps": (4,)}, {"evaluations": 3}, "dsp-k4", 2, "cells/dsp-k4*.partial/**/*.*"),
        pytest.param(
            *("astar", {"variants": ("paper",), "budgets": (60.0,)}, {}, "paper-b60", 3, "kept/searched.npz"),
            marks=pytest.mark.zoo,
        ),
    ],
)
def test_an_interrupted_cell_gives_the_result_of_an_uninterrupted_cell(
    kind: str,
    axes: dict[str, tuple[Any, ...]],
    options: dict[str, Any],
    stage: str,
    after: int,
    remaining_files: str,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training resumes from a checkpoint, a search with its evaluations; only the total cost differs."""
    monkeypatch.setattr(StudyContext, "write_seconds", 0.0)
    uninterrupted, interrupted = (
        request_of(inputs, tmp_path / name, axes=axes, options=options) for name in ("whole", "stopped")
    )
    study(kind, uninterrupted)
    with pytest.raises(KeyboardInterrupt, match=re.escape(str(tmp_path / "stopped"))):
        study(kind, interrupted, StageRecorder(stage, interrupt, after=after))
    assert any((tmp_path / "stopped").glob(remaining_files))
    study(kind, interrupted)
    first, second = ([{**row, "forwards": ""} for row in table(tmp_path / name)] for name in ("whole", "stopped"))
    assert first == second


def test_a_later_request_adds_cells(inputs: Path, tmp_path: Path) -> None:
    study("grid", request_of(inputs, tmp_path, axes={"methods": ("ste",), "keeps": (4,)}))
    recorder = StageRecorder()
    study("grid", request_of(inputs, tmp_path, axes={"methods": ("ste",), "keeps": (1,)}), recorder)
    assert recorder.names[1:-1] == ["ste-k1-s1"]
    assert [row["keep"] for row in table(tmp_path)] == ["8", "4", "1"]


def test_an_interrupted_cell_keeps_its_working_folder(tmp_path: Path) -> None:
    """Files that a killed process leaves in the folder of a cell, e.g. checkpoints, remain for the next run."""

    def run_and_interrupt(cell: Cell, work: Path, on_progress: ProgressCallback) -> dict[str, Any]:
        (work / "step").write_text("7")
        raise KeyboardInterrupt

    def resume(cell: Cell, work: Path, on_progress: ProgressCallback) -> dict[str, Any]:
        return {"step": (work / "step").read_text()}

    folder = CellStore(tmp_path, {})
    with pytest.raises(KeyboardInterrupt):
        folder.run([Cell("a", {})], run_and_interrupt, StageRecorder())
    assert folder.results() == []
    folder.run([Cell("a", {})], resume, StageRecorder())
    assert folder.results() == [{"cell": "a", "settings": {}, "step": "7"}]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_cell_that_another_process_holds_is_not_run(tmp_path: Path) -> None:
    """Cells b and c run while another process holds a; then this process waits until a is finished."""
    holder_code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input();"
    )
    holder_code += "open(sys.argv[1].replace('.lock', '.json'), 'w').write('{\"cell\": \"a\", \"by\": \"other\"}')"
    folder = CellStore(tmp_path, {})
    lock = tmp_path / "cells" / "a.lock"
    lock.parent.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", holder_code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other_process:
        assert other_process.stdin
        assert other_process.stdout
        other_process.stdout.readline()
        cells_run = []

        def run_cell(cell: Cell, work: Path, on_progress: ProgressCallback) -> dict[str, Any]:
            cells_run.append(cell.name)
            if cell.name == "c":
                other_process.stdin.write("\n")  # type: ignore[union-attr]
                other_process.stdin.flush()  # type: ignore[union-attr]
            return {}

        folder.run([Cell(name, {}, ("b",) * (name == "c")) for name in "abc"], run_cell, StageRecorder())
    assert cells_run == ["b", "c"]
    assert [result.get("by") for result in folder.results()] == ["other", None, None]


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    folder = CellStore(tmp_path, {})
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "a.lock").touch()  # left by a killed process
    folder.run([Cell("a", {})], lambda cell, work, on_progress: {}, StageRecorder())
    assert len(folder.results()) == 1
    with (tmp_path / "cells" / "a.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
