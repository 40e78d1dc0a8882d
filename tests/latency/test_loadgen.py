"""Scenarios of LoadGen: what they measure, and that they end if calls are slow or fail, or a user interrupts them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from compressor.config.check import Scenario
from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.latency import CheckPhase, Outcome, artifacts, check, loadgen
from compressor.latency.loadgen import MIN_QUERIES, MORE_QUERIES, ScenarioSettings, run_scenario, run_until_proven
from tests.command import compress
from tests.latency.graphs import softmax_graph
from tests.latency.grpc_server import request_for, serving
from tests.latency.timers import EQUAL_TIMES
from tests.latency.verdicts import slowdown

pytest.importorskip("mlperf_loadgen")

SETTINGS = ScenarioSettings(batch=4, p50=0.2, bound=10_000.0, rate=5000.0, seconds=0.1, concurrency=4)


def call() -> None:
    time.sleep(1e-4)


@pytest.mark.parametrize("scenario", ["SingleStream", "Server"])
def test_the_tail_is_bounded(scenario: Scenario) -> None:
    result = run_scenario(scenario, [call], SETTINGS)
    assert result.holds
    assert result.queries >= MIN_QUERIES
    assert result.milliseconds is not None
    assert result.milliseconds >= 0.1
    assert (result.rate is not None) is (scenario == "Server")
    tight = run_scenario(scenario, [call], replace(SETTINGS, bound=1e-3))
    assert not tight.holds
    assert tight.observed is not None
    assert tight.observed > 1e-3
    assert not tight.unproven


def test_without_a_bound_the_tail_is_measured() -> None:
    result = run_scenario("SingleStream", [call], replace(SETTINGS, bound=None))
    assert result.holds
    assert result.observed is not None
    assert result.observed >= 0.1


def test_throughput_is_measured() -> None:
    result = run_scenario("Offline", [call], replace(SETTINGS, bound=None))
    assert result.samples_per_second is not None
    assert 0 < result.samples_per_second < 4 * 4 / 1e-4, "four threads, each with four rows per call"


def test_a_scenario_ends_although_requests_arrive_faster_than_responses() -> None:
    overloaded = replace(SETTINGS, p50=0.01, bound=1.0, seconds=0.02, rate=20_000.0)
    result = run_scenario("Server", [lambda: time.sleep(0.05)], overloaded)
    assert not result.holds
    assert result.bound == 1.0
    assert result.queries == 0 or (result.observed is not None and result.observed > 1.0)


@pytest.mark.parametrize("scenario", ["SingleStream", "Offline"])
def test_the_error_of_a_call_is_reported_at_once_and_raised_at_the_end(scenario: Any) -> None:
    reported: list[BaseException] = []

    def fail() -> None:
        raise RuntimeError("no call")

    with pytest.raises(RuntimeError, match="no call"):
        run_scenario(scenario, [fail], SETTINGS, reported.append)
    assert [str(error) for error in reported] == ["no call"]


def test_a_bound_that_few_queries_do_not_prove_is_repeated_with_more() -> None:
    calls = itertools.count()

    def rarely_slow() -> None:
        time.sleep(0.1 if next(calls) % 500 == 499 else 1e-5)

    settings = replace(SETTINGS, bound=50.0, p50=0.1, seconds=0.01)
    first = run_scenario("SingleStream", [rarely_slow], settings)
    assert first.unproven
    assert first.queries < MORE_QUERIES
    repeated = run_until_proven("SingleStream", [rarely_slow], settings)
    assert repeated.holds, repeated.why
    assert repeated.queries >= MORE_QUERIES


def test_a_bound_that_is_proven_or_missed_is_not_repeated() -> None:
    for bound, holds in ((10_000.0, True), (1e-3, False)):
        calls = itertools.count()
        result = run_until_proven("SingleStream", [partial(next, calls)], replace(SETTINGS, bound=bound))
        assert result.holds is holds
        assert next(calls) == result.queries


def test_a_server_that_dies_in_a_scenario_ends_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    history, start = tmp_path / "history.jsonl", time.monotonic()
    request = request_for("grpc://127.0.0.1:9", scenario="server", rate=5)
    with serving(dies_after=32 + 60 + 10) as url:  # the scenario would take two minutes
        verdict = check(request.model_copy(update={"server": url}), timer=EQUAL_TIMES)
    artifacts.append_to_history(history, verdict)
    assert time.monotonic() - start < 60
    assert (verdict.outcome, verdict.phase) == (Outcome.INTERRUPTED, CheckPhase.SCENARIOS)
    assert "gone" in verdict.interrupted
    assert verdict.slowdown is not None
    assert verdict.scenarios == ()
    assert artifacts.read_history(history) == [verdict]


def test_a_process_that_ends_without_a_result_is_an_error() -> None:
    request, silent = request_for("grpc://127.0.0.1:9"), itertools.chain  # takes any arguments and sends nothing
    with pytest.raises(CompressorError) as error:
        loadgen.measure("Server", request, [], slowdown(), worker=silent)
    assert error.value.code is ErrorCode.PROCESS_ENDED
    assert (error.value.details["scenario"], error.value.details["exit_code"]) == ("Server", 0)


def test_an_error_is_sent_to_the_parent_with_its_code() -> None:
    error = InputError("refused", code=ErrorCode.REQUEST_REFUSED, url="grpc://127.0.0.1:9")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.code, copy.details) == (InputError, "refused", error.code, error.details)


@pytest.mark.zoo
def test_ctrl_c_ends_a_scenario_and_its_process() -> None:
    with serving() as url:
        # A shell that runs the tests in the background makes every process that they start ignore Ctrl-C.
        command = ["env", "--default-signal=INT", sys.executable, "-m", "compressor.cli", "check", "--server", url]
        command += ["--model", "small", "--baseline", "dense", "--seconds", "0.1", "--max-slowdown", "1000%"]
        command += ["--scenario", "server", "--rate", "5", "--quiet"]
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        children: list[psutil.Process] = []
        while len(children) < 2 and running.poll() is None:  # one is Python's resource tracker
            time.sleep(0.1)
            children = psutil.Process(running.pid).children()
        os.killpg(running.pid, signal.SIGINT)
        _, stderr = running.communicate(timeout=60)
    assert (running.returncode, stderr) == (130, "compress: interrupted\n")
    assert not psutil.wait_procs(children, timeout=10)[1]


class InterruptingBatch:
    """A batch that is sent to another process while Ctrl-C is pressed."""

    sent = False

    def __reduce__(self) -> tuple[type[dict[str, object]], tuple[()]]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # another thread may receive the signal
        self.sent = True
        return dict, ()


def test_ctrl_c_while_a_process_starts_waits_for_its_arguments() -> None:
    request, batch, ended = request_for("grpc://127.0.0.1:9"), InterruptingBatch(), threading.Event()
    thread = threading.Thread(target=ended.wait)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            loadgen.measure("Server", request, [batch], slowdown())  # type: ignore[list-item]
        assert batch.sent
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
        ended.set()
        thread.join()
    assert not multiprocessing.active_children()


def test_a_bound_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = softmax_graph(tmp_path / "graph.onnx")
    result = compress(
        capfd,
        *("check", path, "--baseline", path, "--seconds", "0.1", "--max-slowdown", "1000%", "--quiet", "--json"),
        *("--p99", "0.000001ms", "--load-seconds", "0.1"),
    )
    assert (result.code, result.error_code) == (7, ErrorCode.TOO_SLOW)
    (scenario,) = result.details["verdict"].scenarios
    assert (scenario.scenario, scenario.holds, scenario.unproven) == ("SingleStream", False, False)
    assert scenario.queries >= loadgen.MIN_QUERIES
    assert [entry["scenario"] for entry in result.json["scenarios"]] == ["SingleStream"]
