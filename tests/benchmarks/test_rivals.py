"""The table of rivals: its rows, how they are measured, and what happens where one cannot be made."""

from __future__ import annotations

import json
import re
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.rivals import __main__ as table
from benchmarks.rivals import tools
from benchmarks.rivals.data import INPUTS, Feeds
from benchmarks.rivals.measure import BACKENDS, BATCH, predict_padded
from benchmarks.rivals.points import points_of
from benchmarks.rivals.rows import RIVALS, folder_name, recipe_of, row_and_seed
from benchmarks.text_sets import SETS
from compressor.report.frontier import read_points

LENGTH = 16
NUMBERS = {
    "metric": 0.9,
    "difference": -0.004,
    "low": -0.01,
    "high": 0.002,
    "scale": 100.0,
    "bytes": 2e7,
    "memory": 5e7,
}
TIMES: dict[str, Any] = {
    "timings": [
        {"p50-1": time, "ratio-1": ratio, "p50-8": 8 * time, "ratio-8": ratio + 1}
        for time, ratio in ((2.5, 3.0), (9.0, 2.0), (2.0, 3.25))
    ],
    "minutes": 1.5,
}


@pytest.mark.parametrize("rows", [1, BATCH, BATCH + 3])
def test_padding_to_one_shape_does_not_change_outputs(rows: int) -> None:
    rng = np.random.default_rng(rows)
    feeds = {name: rng.integers(1, 9, (rows, 5)) for name in INPUTS}
    shapes = set()

    def predict(batch: Feeds) -> dict[str, np.ndarray]:
        shapes.add(batch["input_ids"].shape)
        tokens = batch["input_ids"] * batch["attention_mask"] + batch["token_type_ids"]
        return {"logits": tokens.sum(1, keepdims=True), "start_logits": tokens}

    padded, plain = predict_padded(predict, feeds, LENGTH), predict(feeds)
    assert shapes == {(BATCH, LENGTH), (rows, 5)}
    for name, values in plain.items():
        np.testing.assert_array_equal(padded[name], values)


def test_rows_are_points_for_the_page_of_a_ladder(tmp_path: Path) -> None:
    file = tmp_path / "rivals.json"
    rows = {"pytorch": {**NUMBERS, **TIMES}, "torchao": {"failed": "no"}}
    file.write_text(json.dumps(points_of("sst2", rows)))
    single, eight = read_points(file)
    assert (single.batch, eight.batch) == (1, BATCH)
    assert (single.p50, single.p50_interval) == (2.5, (2.0, 9.0))
    assert single.metric_interval == pytest.approx((0.894, 0.906))


@pytest.mark.parametrize("name", SETS)
def test_every_run_has_a_valid_recipe(name: str, tmp_path: Path) -> None:
    student = tmp_path / "student"
    for folder in (tmp_path / "model", student):
        folder.mkdir()
    for file in (tmp_path / f"rows.{SETS[name].suffix}", student / "plan.json"):
        file.touch()
    rows = {row: rival for row, rival in RIVALS.items() if rival.fields is not None}
    assert rows
    for row, rival in rows.items():
        # What comes before a run that removes nothing makes a smaller model with a plan.
        removes = {"macs", "keep"} & set(rival.fields or {})
        fields = {**(rival.fields or {}), **({} if rival.make is None or removes else {"model": student})}
        assert recipe_of(name, tmp_path, tmp_path / row, fields).measure.seq == (SETS[name].max_length,)


def test_every_row_is_made_or_loaded_as_it_is() -> None:
    for row, rival in RIVALS.items():
        assert rival.backend in BACKENDS
        assert (rival.file is None) == (rival.make is None and rival.fields is None), row


def test_a_row_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(name: str, row: str, root: Path) -> dict[str, float]:
        raise RuntimeError("no such package\nand more")

    monkeypatch.setitem(table.STEPS, "make", fail)
    assert table.print_step("make", "sst2", "onnxsim", Path("none")) == 1
    failed = json.loads(capsys.readouterr().out)
    assert failed == {"failed": "RuntimeError: no such package"}
    table.print_table("sst2", {"onnxsim": failed, "pruned": {**NUMBERS, **TIMES, "heading": "accuracy, %", "rows": 7}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "sst2, accuracy, %, 7 test rows, 128 tokens"
    assert "no such package" in lines[5]
    speeds = "2.50 | 3.00x (2.00 to 3.25) | 20.0 | 4.00x (3.00 to 4.25) |"
    assert lines[6].startswith(f"| compress, half of the MACs, int8 | 90.0 | -0.4 (-1.0 to +0.2) | {speeds}")


def test_rows_are_timed_in_rounds_and_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps: list[tuple[str, str]] = []

    def run_step(step: str, _name: str, folder: str, _out: Path) -> dict[str, Any]:
        steps.append((step, folder))
        return {"minutes": 1.0} if step == "make" else dict(TIMES["timings"][0]) if step == "time" else dict(NUMBERS)

    (tmp_path / "sst2" / "rivals").mkdir(parents=True)
    monkeypatch.setattr(table, "run_step", run_step)
    for _ in range(2):  # stored rows are not repeated
        rows = {row: table.score_row("sst2", row, tmp_path) for row in ("pruned", "layers")}
        table.time_rows("sst2", rows, tmp_path)
        assert [len(numbers["timings"]) for numbers in rows.values()] == [3, 3]
    scored = [(step, row) for row in rows for step in ("make", "score")]
    assert steps == [*scored, *(("time", row) for _ in range(3) for row in rows)]


def test_a_row_that_cannot_be_timed_is_not_stored_as_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = {"make": {"minutes": 1.0}, "score": NUMBERS, "time": {"failed": "exit code 1"}}
    (tmp_path / "sst2" / "rivals").mkdir(parents=True)
    monkeypatch.setattr(table, "run_step", lambda step, *_: results[step])
    rows = {"pruned": table.score_row("sst2", "pruned", tmp_path)}
    table.time_rows("sst2", rows, tmp_path)
    assert rows["pruned"]["failed"] == "exit code 1"
    assert table.score_row("sst2", "pruned", tmp_path) == {"timings": [], "minutes": 1.0, **NUMBERS}


def test_further_seeds_are_scored_of_rows_that_choose_or_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    further = {"pruned-seed1": {"difference": 0.01}, "pruned-seed2": {"failed": "exit code 1"}}
    monkeypatch.setattr(table, "score_row", lambda _name, folder, _out: further[folder])
    numbers = table.all_seeds("sst2", "pruned", {**NUMBERS, **TIMES}, 3, tmp_path)
    assert table.as_cells("pruned", numbers)["all seeds"] == "-0.4, +1.0, not made: exit code 1"
    assert "seeds" not in table.all_seeds("sst2", "pruned", {**NUMBERS, **TIMES}, 1, tmp_path)
    assert "seeds" not in table.all_seeds("sst2", "onnxsim", {**NUMBERS, **TIMES}, 3, tmp_path)
    assert [row_and_seed(folder_name("pruned", seed)) for seed in (0, 12)] == [("pruned", 0), ("pruned", 12)]


def test_metrics_that_are_no_shares_are_shown_as_computed() -> None:
    assert table.as_cells("pruned", {**NUMBERS, **TIMES, "scale": 1.0})["metric"] == "0.900"


def test_other_tools_are_pinned() -> None:
    pins = [line for path in Path(table.__file__).parent.glob("pins/*.txt") for line in path.read_text().splitlines()]
    assert len(pins) > 2
    for pin in pins:
        assert re.fullmatch(r"[\w.-]+==[\w.]+", pin)


@pytest.mark.parametrize(
    ("tool", "install"), [("onnxsim", tools.import_onnxsim), ("optimum-intel", tools.optimum_python)]
)
def test_a_tool_that_does_not_install_is_named(
    tool: str, install: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "Collecting\nERROR: no matching distribution\n\n")

    monkeypatch.setattr(venv, "create", lambda *arguments, **settings: None)
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(tools.ToolError) as caught:
        install(tmp_path / "sst2")
    assert tool in str(caught.value)
    assert str(caught.value).endswith("ERROR: no matching distribution")
