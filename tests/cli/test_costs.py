"""`compress costs`: tables, files and errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForSequenceClassification

from compressor.errors import ErrorCode
from compressor.measure.costs import CostTable
from compressor.pruning import measure
from compressor.pruning.measure import CostSource
from compressor.targets.onnxruntime import engine
from compressor.targets.onnxruntime.engine import Fusion
from graph_passes import load, save
from tests import folders
from tests.command import CommandResult, compress

Cap = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of one layer with two heads and two neurons, so that few engines are timed."""
    config = BertConfig(**{**folders.SIZES, "intermediate_size": 2})
    return folders.save(BertForSequenceClassification(config), tmp_path_factory.mktemp("bert"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run graphs as they are: fusing takes most of the time in which a tiny engine is built."""

    def copy(source: Path, out: Path, settings: object) -> Fusion:
        save(load(source), out)
        return Fusion(fused=False, reason="not tried")

    monkeypatch.setattr(engine, "fuse", copy)


def tables_of_macs(source: CostSource, macs: CostTable, *arguments: object) -> list[CostTable]:
    return [macs.model_copy(update={"unit": "ms", "engine": "ort fp32", "seq": 8, "batch": 1})]


def costs(capfd: Cap, model: Path, *flags: str | Path) -> CommandResult:
    return compress(capfd, "costs", model, "--batch", "1", "--seq", "8", "--threads", "1", *flags)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("is_timed", [False, pytest.param(True, marks=pytest.mark.zoo)])
def test_costs_are_measured_once_and_written(
    is_timed: bool, capfd: Cap, model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without timing, times are multiply-accumulates, so that no engine of a cost table is built."""
    monkeypatch.setattr(measure, "_DRIFT", math.inf)  # times of a tiny model vary
    if not is_timed:
        monkeypatch.setattr(CostSource, "measured_tables", tables_of_macs)
    page, picture = tmp_path / "costs.html", tmp_path / "costs.svg"
    result = costs(capfd, model, "-o", page)
    assert result.code == 0, result.err
    assert "timing the cost of units (ort fp32)" in result.err
    assert page.read_text().count("<svg") == 2
    again = costs(capfd, model, "-o", picture, "--json")
    assert "timing the cost of units" not in again.err
    assert picture.read_text().startswith("<?xml")
    assert (again.json["model"], again.json["engine"]) == (model.name, "ort fp32")
    (table,) = again.json["tables"]
    assert (table["batch"], table["seq"], table["unit"]) == (1, 8, "ms")
    rows: dict[str, Any] = {row["type"]: row for row in table["rows"]}
    layer = "bert.encoder.layer.0"
    assert rows["heads"]["groups"] == [f"{layer}.attention.self"]
    assert rows["neurons"]["groups"] == [f"{layer}.output.dense"]
    assert (rows["heads"]["counts"][0], rows["heads"]["counts"][-1]) == (0, 2)
    assert isinstance(rows["heads"]["cliffs"], list)
    (file,) = cache.rglob("costs-*/result.json")
    stored = CostTable.model_validate(json.loads(file.read_text())[0])
    listed = compress(capfd, "sites", model, "--no-count", "--json").json
    assert [row["ms"] for row in listed] == [stored.saving(row["name"], 0) for row in listed]
    refused = costs(capfd, model, "-o", page)
    assert (refused.code, refused.error_code) == (2, ErrorCode.OUTPUT_EXISTS)


@pytest.mark.parametrize(
    ("flags", "exit_code", "code"),
    [
        (("-o", "costs.png"), 2, ErrorCode.INVALID_VALUE),
        (("-o", "no/costs.svg"), 2, ErrorCode.FILE_MISSING),
        (("--target", "auto"), 2, ErrorCode.CONTRADICTION),
        (("--target", "none"), 2, ErrorCode.UNKNOWN_NAME),
        (("--target", "trt", "--precision", "int8"), 6, ErrorCode.DEVICE_MISSING),
        (("--precision", "fp16", "--provider", "cpu"), 6, ErrorCode.DEVICE_MISSING),
        (("--seq", "99"), 3, ErrorCode.OUT_OF_RANGE),
        (("--batch", "0"), 2, ErrorCode.OUT_OF_RANGE),
    ],
)
def test_bad_input_is_refused(
    capfd: Cap, model: Path, cache: Path, flags: tuple[str, ...], exit_code: int, code: ErrorCode
) -> None:
    result = costs(capfd, model, *flags, "--quiet")
    assert (result.code, result.error_code, result.out) == (exit_code, code, "")
    assert not cache.exists()


def test_a_missing_folder_is_refused(capfd: Cap, tmp_path: Path) -> None:
    result = costs(capfd, tmp_path / "no", "--quiet")
    assert (result.code, result.error_code) == (3, ErrorCode.FILE_MISSING)
