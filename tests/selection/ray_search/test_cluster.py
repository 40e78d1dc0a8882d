"""Ray in a separate process: no answer gives a one-line error, and an interruption leaves no process."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from compressor.errors import ErrorCode, TargetMissingError
from compressor.selection.ray_search.cluster import RayPool, check_reachable, is_installed
from tests.command import enable_ctrl_c
from tests.faults import fails_with

needs_ray = pytest.mark.skipif(not is_installed(), reason="ray is not installed")

SEARCH = """
import sys
from compressor.selection.ray_search.evaluator import evaluator_factory
from tests.selection.ray_search.test_evaluator import evaluator_of
assert "ray" not in sys.modules
with evaluator_factory("local:1") as make:
    evaluator = evaluator_of(make)
    while True:
        evaluator_of(make).evaluate(frozenset(evaluator.heads))
"""


def command_of(process: psutil.Process) -> str:
    """The command line of a process; empty once it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.mark.zoo
@needs_ray
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_search_leaves_no_process(signal_number: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        search = subprocess.Popen(
            [sys.executable, "-c", SEARCH],
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.DEVNULL,
            preexec_fn=enable_ctrl_c,
        )
        process = psutil.Process(search.pid)
        started: list[psutil.Process] = []
        while not any("ray::" in command_of(child) for child in started):
            assert search.poll() is None
            time.sleep(0.2)
            started = process.children(recursive=True)
        search.send_signal(signal_number)
        assert search.wait(120) in (1, 130, -signal_number)
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
        if signal_number == signal.SIGINT:
            assert list(Path(folder).iterdir()) == []


def test_an_address_that_refuses_gives_a_one_line_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        reason = "Connection refused"
        with fails_with(ErrorCode.SERVER_UNREACHABLE, TargetMissingError, field="ray", value=address, reason=reason):
            check_reachable(address)


@needs_ray
def test_an_address_that_does_not_answer_gives_a_one_line_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_reachable(address)
        with fails_with(ErrorCode.SERVER_UNREACHABLE, TargetMissingError, value=address, reason="no answer for 1 s"):
            RayPool(address, answer_seconds=1).start(0, 1, on_gpu=False)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not is_installed()
    with fails_with(ErrorCode.PACKAGE_MISSING, TargetMissingError, value="local", package="ray") as caught:
        check_reachable("local")
    assert "pip install '.[distributed]' in a checkout of compressor" in str(caught.value)
