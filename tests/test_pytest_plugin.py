"""The latency check as a pytest fixture: its options, its files, and tests that fail with the check."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compressor import pytest_plugin
from compressor.errors import CompressorError, ErrorCode, UsageError
from compressor.latency import CheckArtifacts, CheckRequest
from tests.latency.graphs import softmax_graph


def test_options_match_those_of_the_command() -> None:
    options = {"max_slowdown": "5%", "p99": "10ms", "scenario": ["server", "singlestream"], "rate": 5.0}
    options |= {"server": "grpc://localhost:8001", "inputs": "rows.tsv", "expect": Path("out"), "junit": "j.xml"}
    request, files = pytest_plugin.split_options({"model": "small", "baseline": Path("b.json"), **options})
    assert request() == CheckRequest(
        model="small",
        baseline="b.json",
        server="grpc://localhost:8001",
        max_slowdown=0.05,
        p99=10.0,
        scenario=("Server", "SingleStream"),
        rate=5.0,
        inputs=Path("rows.tsv"),
        expect="out",
    )
    assert files == CheckArtifacts(junit=Path("j.xml"))


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"max_slowdown": 5.0}, ErrorCode.OUT_OF_RANGE, "max_slowdown"),
        ({"speed": 3}, ErrorCode.UNKNOWN_NAME, "speed"),
        ({"baseline": None}, ErrorCode.MISSING_VALUE, "baseline"),
        ({"plot": "p.svg"}, ErrorCode.CONTRADICTION, "plot"),
    ],
)
def test_faults_of_options_name_their_field(options: dict[str, object], code: ErrorCode, field: str) -> None:
    with pytest.raises(UsageError) as error:
        pytest_plugin.split_options({"model": "small", "baseline": "dense", **options})[0]()
    assert (error.value.code, error.value.details["field"]) == (code, field)


def test_checks_wait_for_each_other(tmp_path: Path) -> None:
    held: list[bool] = []

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        held.append(True)
        yield
        held.append(False)

    missing = {"model": tmp_path / "none.onnx", "baseline": "none.onnx"}
    with pytest.raises(CompressorError) as error:
        pytest_plugin.run_check(missing, lambda *section: None, lock())
    assert error.value.code is ErrorCode.FILE_MISSING
    assert held == [True], "the check ran while the lock was held, and its error went through it"
    assert pytest_plugin.LOCK_FILE.name.startswith("compressor-latency-check-")


@pytest.mark.zoo
def test_the_fixture_fails_if_the_check_fails(tmp_path: Path) -> None:
    graph, wrong = softmax_graph(tmp_path / "graph.onnx"), softmax_graph(tmp_path / "wrong.onnx", scale=2.0)
    (tmp_path / "test_latency.py").write_text(
        f"""
import pytest
pytestmark = pytest.mark.latency_gate(baseline={str(graph)!r}, seconds=0.1, max_slowdown="1000%")

@pytest.mark.latency_gate(history="history.jsonl", junit="passed.xml")
def test_as_fast(latency_gate):
    assert latency_gate({str(graph)!r}).passed

@pytest.mark.latency_gate(expect="baseline", junit="wrong.xml")
def test_wrong(latency_gate):
    latency_gate({str(wrong)!r})

def test_unknown_option(latency_gate):
    latency_gate({str(graph)!r}, speed=3)

@pytest.mark.latency_gate(model="another")
def test_the_test_names_the_model(latency_gate):
    pass

@pytest.mark.latency_gate("5%")
def test_nameless(latency_gate):
    pass
"""
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rP", "--strict-markers", str(tmp_path)]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 failed, 1 passed, 2 errors" in process.stdout, process.stdout + process.stderr
    assert "'5%' has no name; the marker takes named options" in process.stdout
    assert "the test names the model, latency_gate(MODEL), not the marker" in process.stdout
    assert f"latency check: {graph} against {graph}" in process.stdout, "the verdict is a section of the report"
    assert "the outputs differ from those of the baseline" in process.stdout
    assert "unknown option speed" in process.stdout
    assert (tmp_path / "history.jsonl").exists()
    suites = [ElementTree.parse(tmp_path / name).getroot() for name in ("passed.xml", "wrong.xml")]
    assert [suite.get("failures") for suite in suites] == ["0", "1"]
