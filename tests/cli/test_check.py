"""The command `compress check`: exit codes, printed text, and written files."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from compressor.errors import ErrorCode
from compressor.latency import CheckPhase, artifacts
from tests.command import compress
from tests.latency.graphs import softmax_graph, wide_graph
from tests.latency.grpc_server import serving

Cap = pytest.CaptureFixture[str]
QUICK: tuple[str | Path, ...] = ("--seconds", "0.1", "--max-slowdown", "1000%", "--quiet")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return softmax_graph(tmp_path_factory.mktemp("check") / "graph.onnx")


def suite_of(path: Path) -> ElementTree.Element:
    return ElementTree.parse(path).getroot()


def test_a_graph_passes_against_itself_and_against_its_saved_times(graph: Path, tmp_path: Path, capfd: Cap) -> None:
    files = {name: tmp_path / name for name in ("b.json", "j.xml", "h.jsonl", "p.svg")}
    options = ("--save-baseline", files["b.json"], "--junit", files["j.xml"], "--history", files["h.jsonl"])
    first = compress(capfd, "check", graph, "--baseline", graph, *QUICK, *options, "--json")
    assert (first.code, first.err) == (0, "")
    assert (first.json["passed"], first.json["outcome"]) == (True, "passed")
    assert first.json["outputs"]["error"] <= 1e-5
    suite = suite_of(files["j.xml"])
    assert [case.get("name") for case in suite] == ["outputs", "slowdown", None]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "0")
    history_options = ("--history", files["h.jsonl"], "--plot", files["p.svg"])
    second = compress(capfd, "check", graph, "--baseline", files["b.json"], *QUICK, *history_options)
    assert second.code == 0, second.err
    records = artifacts.read_history(files["h.jsonl"])
    assert [record.slowdown.interleaved for record in records if record.slowdown] == [True, False]
    assert [line.split()[0] for line in second.out.splitlines()] == ["outputs", "p50", "p99", "speed"]
    assert files["p.svg"].read_text().startswith("<?xml")


def test_a_slower_model_exits_with_7(graph: Path, tmp_path: Path, capfd: Cap) -> None:
    junit, slow = tmp_path / "j.xml", wide_graph(tmp_path / "slow.onnx")
    arguments = (slow, "--baseline", graph, "--seconds", "0.1", "--max-slowdown", "0%", "--junit", junit, "--quiet")
    result = compress(capfd, "check", *arguments)
    assert (result.code, result.error_code) == (7, ErrorCode.TOO_SLOW)
    assert result.details["verdict"].slowdown.limit == 0.0
    assert f"slower than {graph}" in result.error
    assert suite_of(junit).get("failures") == "1"


def test_wrong_outputs_exit_with_5(graph: Path, tmp_path: Path, capfd: Cap) -> None:
    junit, inputs, outputs = tmp_path / "j.xml", tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    np.savez(inputs, x=np.ones((4, 4), np.float32))
    np.savez(outputs, y=np.zeros((4, 3), np.float32))
    options = ("--inputs", inputs, "--expect", outputs, "--junit", junit)
    result = compress(capfd, "check", graph, "--baseline", graph, *QUICK, *options)
    assert (result.code, result.error_code) == (5, ErrorCode.OUTPUTS_DIFFER)
    assert str(outputs) in result.error
    assert suite_of(junit).get("failures") == "1"


def test_a_server_that_dies_midway_exits_with_10(tmp_path: Path, capfd: Cap) -> None:
    history = tmp_path / "history.jsonl"
    with serving(dies_after=400) as url:
        result = compress(
            capfd,
            *("check", "--server", url, "--model", "small", "--baseline", "dense", "--seconds", "60", "--quiet"),
            *("--history", history, "--max-slowdown", "1000%"),
        )
    assert (result.code, result.error_code, result.details["phase"]) == (
        10,
        ErrorCode.CHECK_INTERRUPTED,
        CheckPhase.TIMING,
    )
    assert "gone" in result.error
    (record,) = artifacts.read_history(history)
    assert record.interrupted
    assert record.slowdown is not None
    assert record.slowdown.rounds >= 1


def test_a_check_that_cannot_run_replaces_an_older_report(graph: Path, tmp_path: Path, capfd: Cap) -> None:
    truncated, junit, history = tmp_path / "torn.onnx", tmp_path / "j.xml", tmp_path / "history.jsonl"
    truncated.write_bytes(graph.read_bytes()[:20])
    history.write_text("nothing\n")
    faults: list[tuple[tuple[str | Path, ...], int]] = [
        ((truncated, "--baseline", graph), 3),
        ((graph, "--baseline", graph, "--history", history), 3),
        ((graph, "--baseline", graph, "--rate", "5"), 2),
    ]
    for arguments, code in faults:
        junit.write_text("an older report of a check that passed")
        assert compress(capfd, "check", *arguments, "--junit", junit, "--quiet").code == code
        suite = suite_of(junit)
        assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
        assert suite[0][0].tag == "error"
    assert history.read_text() == "nothing\n"


@pytest.mark.zoo
def test_times_of_another_machine_are_compared_only_with_force(graph: Path, tmp_path: Path, capfd: Cap) -> None:
    saved, other_machine = tmp_path / "b.json", tmp_path / "elsewhere.json"
    assert compress(capfd, "check", graph, "--baseline", graph, *QUICK, "--save-baseline", saved).code == 0
    record = json.loads(saved.read_text())
    other_machine.write_text(json.dumps({**record, "machine": {**record["machine"], "processor": "another"}}))
    refused = compress(capfd, "check", graph, "--baseline", other_machine, *QUICK)
    assert (refused.code, refused.error_code) == (3, ErrorCode.FILE_MISMATCH)
    assert refused.details["differences"] == ("processor",)
    assert compress(capfd, "check", graph, "--baseline", other_machine, *QUICK, "--force").code == 0
    assert compress(capfd, "check", graph, "--baseline", saved, *QUICK, "--batch", "2").code == 3


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "field"),
    [
        (["--baseline", "d.onnx"], 2, ErrorCode.MISSING_VALUE, "model"),
        (["m.onnx"], 2, ErrorCode.MISSING_VALUE, "baseline"),
        (["m.onnx", "--model", "small", "--baseline", "dense"], 2, ErrorCode.CONTRADICTION, "model"),
        (["m.onnx", "--server", "grpc://localhost:8001", "--baseline", "dense"], 2, ErrorCode.CONTRADICTION, "server"),
        (["m.onnx", "--baseline", "d.onnx", "--max-slowdown", "5"], 2, ErrorCode.OUT_OF_RANGE, "max_slowdown"),
        (["m.onnx", "--baseline", "d.onnx", "--scenario", "fast"], 2, ErrorCode.UNKNOWN_NAME, "scenario"),
        (["m.onnx", "--baseline", "d.onnx", "--plot", "p.svg"], 2, ErrorCode.CONTRADICTION, "plot"),
        (["none.onnx", "--baseline", "d.onnx"], 3, ErrorCode.FILE_MISSING, None),
        (["m.onnx", "--baseline", "d.onnx", "--slowdown", "5%"], 2, None, None),
    ],
)
def test_bad_input_gives_a_one_line_error(
    arguments: list[str], exit_code: int, code: ErrorCode | None, field: str | None, capfd: Cap
) -> None:
    result = compress(capfd, "check", *arguments, "--quiet")
    assert (result.code, result.out) == (exit_code, "")
    assert result.error
    assert (result.error_code, result.details.get("field")) == (code, field)
