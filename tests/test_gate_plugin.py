"""The latency gate as a pytest fixture: its options, its files, and that a test fails where the check does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from compressor import pytest_plugin
from compressor.errors import UsageError
from compressor.latency import CheckRequest
from tests.served import graph


def test_options_are_those_of_the_command() -> None:
    given = {"max_slowdown": "5%", "p99": "10ms", "scenario": ["server", "singlestream"], "rate": 5.0}
    given |= {"server": "grpc://localhost:8001", "inputs": "rows.tsv", "expect": Path("out")}
    assert pytest_plugin._asked({"model": "small", "baseline": Path("b.json"), **given}) == CheckRequest(
        "small",
        "b.json",
        "grpc://localhost:8001",
        max_slowdown=0.05,
        p99=10.0,
        scenarios=("Server", "SingleStream"),
        rate=5.0,
        inputs=Path("rows.tsv"),
        expect="out",
    )
    with pytest.raises(UsageError, match=r"as in 5% or 0\.05"):
        pytest_plugin._asked({"model": "small", "baseline": "dense", "max_slowdown": 5.0})


def test_checks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []

    class Lock:
        def __init__(self, path: Path) -> None:
            self.path = path

        def __enter__(self) -> None:
            held.append(self.path.name)

        def __exit__(self, *_: object) -> None:
            held.pop()

    def checked(asked: CheckRequest) -> SimpleNamespace:
        return SimpleNamespace(interrupted="", failures=(), lines=lambda: list(held))

    told: list[str] = []
    monkeypatch.setattr("filelock.FileLock", Lock)
    monkeypatch.setattr("compressor.latency.check", checked)
    pytest_plugin._checked({"model": "small", "baseline": "dense"}, lambda when, title, text: told.append(text))
    assert told[0].startswith("compressor-latency-gate-")
    assert held == []


def test_the_fixture_fails_where_the_check_does(tmp_path: Path) -> None:
    one, other = graph(tmp_path / "one.onnx"), graph(tmp_path / "other.onnx")
    wrong = graph(tmp_path / "wrong.onnx", scale=2.0)
    (tmp_path / "test_latency.py").write_text(
        f"""
import pytest
pytestmark = pytest.mark.latency_gate(baseline={str(other)!r}, seconds=0.1, max_slowdown="1000%")

@pytest.mark.latency_gate(history="history.jsonl", junit="passed.xml", plot="history.svg")
def test_as_fast(latency_gate):
    assert latency_gate({str(one)!r}).passed

@pytest.mark.latency_gate(expect="baseline", junit="wrong.xml")
def test_wrong(latency_gate):
    latency_gate({str(wrong)!r})

def test_unknown_option(latency_gate):
    latency_gate({str(one)!r}, speed=3)

@pytest.mark.latency_gate(model="another")
def test_the_test_names_the_model(latency_gate):
    pass

@pytest.mark.latency_gate("5%")
def test_nameless(latency_gate):
    pass
"""
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rP", "--strict-markers", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 failed, 1 passed, 2 errors" in done.stdout, done.stdout + done.stderr
    assert "'5%' has no name; the marker takes options by name" in done.stdout
    assert "the marker names a model; the test does" in done.stdout
    assert f"latency gate: {one} against {other}" in done.stdout, "what was found stands beside the test"
    assert "not those of the baseline" in done.stdout
    assert "options are those of compress check" in done.stdout
    assert (tmp_path / "history.jsonl").exists()
    assert (tmp_path / "history.svg").exists()
    found = [ElementTree.parse(tmp_path / name).getroot().get("failures") for name in ("passed.xml", "wrong.xml")]
    assert found == ["0", "1"]
