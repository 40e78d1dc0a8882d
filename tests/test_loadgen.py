"""Absolute bounds by LoadGen: what it measures, and that a scenario ends when a server, a user or the system does."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from compressor.errors import CompressorError
from compressor.latency import CheckRequest, artifacts, check, loadgen, loadgen_process
from compressor.latency.verdict import Slowdown
from compressor.measure import timing
from tests.command import compress
from tests.served import answer, asked, graph, measured, serving

pytest.importorskip("mlperf_loadgen")

TIMES = Slowdown(
    **dict.fromkeys(("baseline_p50", "model_p50", "baseline_p99", "model_p99"), 1.0),
    **dict.fromkeys(("slowdown", "low", "high"), 0.0),
    confidence=0.95,
    limit=0.05,
    blocks=1,
    calls=1,
    interleaved=True,
)
ONE = np.ones((1, 4), np.float32)
COMMON: dict[str, Any] = {"batch": 4, "p50": 0.2, "bound": 10_000.0, "rate": 5000.0, "seconds": 0.1, "at_once": 4}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressor.latency.check.turns", measured(1.0, 1.0))
    monkeypatch.setattr(timing, "settle", lambda: None)


def call() -> None:
    time.sleep(1e-4)


@pytest.mark.parametrize("scenario", ["SingleStream", "Server"])
def test_the_tail_is_bounded(scenario: loadgen.Scenario) -> None:
    found = loadgen.measure(scenario, [call], **COMMON)
    assert found.holds
    assert found.queries >= 662
    assert found.milliseconds is not None
    assert found.milliseconds >= 0.1
    tight = loadgen.measure(scenario, [call], **{**COMMON, "bound": 1e-3})
    assert not tight.holds
    assert tight.why.startswith("p99 ")
    assert not tight.unproven
    assert (found.rate is not None) is (scenario == "Server")


def test_a_bound_that_few_queries_do_not_prove_is_tried_with_more() -> None:
    calls = itertools.count()

    def seldom_slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.3 if next(calls) % 500 == 499 else 0.0)
        return answer(x)

    few = loadgen.measure("SingleStream", [lambda: seldom_slow(ONE)], **{**COMMON, "bound": 200.0})
    assert few.unproven
    assert "keeps the bound of 200 ms, but" in few.why
    with serving({"small": seldom_slow, "dense": answer}) as url:
        (more,) = check(asked(url, p99=200.0, load_seconds=0.1)).loads
    assert more.holds, more.why
    assert more.queries >= loadgen.MORE


def test_throughput_is_measured() -> None:
    found = loadgen.measure("Offline", [call], **COMMON)
    assert found.samples_per_second is not None
    assert found.samples_per_second > 0


def test_a_scenario_ends_though_more_arrives_than_is_answered() -> None:
    found = loadgen.measure(
        "Server", [lambda: time.sleep(0.05)], **{**COMMON, "p50": 0.01, "bound": 1.0, "seconds": 0.05}
    )
    assert not found.holds
    assert "more queries arrive" in found.why or "took longer" in found.why


def test_what_a_call_raises_is_told_at_once_and_raised_at_the_end() -> None:
    told: list[BaseException] = []

    def broken() -> None:
        raise RuntimeError("no call")

    with pytest.raises(RuntimeError, match="no call"):
        loadgen.measure("SingleStream", [broken], **COMMON, on_fault=told.append)
    assert [str(error) for error in told] == ["no call"]


def test_a_check_bounds_a_graph(tmp_path: Path) -> None:
    path = str(graph(tmp_path / "graph.onnx"))
    found = check(CheckRequest(path, path, p99=1e-6, load_seconds=0.1, max_slowdown=1.0))
    (single,) = found.loads
    assert (single.scenario, single.holds, found.interrupted) == ("SingleStream", False, "")
    assert found.failures[0].startswith("SingleStream: p99 ")


def test_a_server_that_dies_in_a_scenario_ends_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    history = tmp_path / "history.jsonl"
    began = time.monotonic()
    with serving(dies_after=100) as url:  # 92 calls come before, and the scenario would take two minutes
        done = compress(
            capfd,
            *("check", "--server", url, "--model", "small", "--baseline", "dense", "--quiet", "--history", history),
            *("--scenario", "server", "--rate", "5"),
        )
    assert time.monotonic() - began < 60
    assert done.code == 10
    assert "gone" in done.error
    (kept,) = artifacts.history(history)
    assert "gone" in kept.interrupted
    assert kept.slowdown is not None
    assert kept.loads == ()


def test_a_process_that_ends_before_its_time_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loadgen_process, "_run", itertools.chain)  # it takes anything and says nothing
    with pytest.raises(CompressorError, match=r"LoadGen, Server: its process ended before its time \(code 0\)"):
        loadgen_process.measure("Server", asked("grpc://127.0.0.1:9"), [], TIMES)


def test_ctrl_c_ends_a_scenario_and_its_process() -> None:
    with serving() as url:
        # A shell that runs the tests in the background makes all that they start ignore Ctrl-C.
        command = ["env", "--default-signal=INT", sys.executable, "-m", "compressor.cli", "check", "--server", url]
        command += ["--model", "small", "--baseline", "dense", "--seconds", "0.1", "--max-slowdown", "1000%"]
        command += ["--scenario", "server", "--rate", "5", "--quiet"]
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        children: list[psutil.Process] = []
        while len(children) < 2 and running.poll() is None:  # one is Python's own, which keeps track of resources
            time.sleep(0.1)
            children = psutil.Process(running.pid).children()
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (130, "compress: interrupted\n")
    assert not psutil.wait_procs(children, timeout=10)[1]
