"""Run a LoadGen scenario in a process of its own, because LoadGen cannot be stopped but a process can.

LoadGen keeps to its schedule however many queries fail. Here the first error is reported at once and ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

from compressor.config.check import CheckRequest, Scenario
from compressor.errors import CompressorError, ErrorCode
from compressor.latency.endpoints import encode_batches, open_endpoint
from compressor.latency.loadgen import ScenarioSettings, run_until_proven
from compressor.latency.verdict import ScenarioResult, Slowdown
from compressor.silence_libraries import one_line
from compressor.targets.base import Feeds
from graph_passes.interrupts import interrupts_deferred

_WARM_UPS = 3
"""Calls before the scenario: the first ones of a process and of an engine take longer."""
_MIN_CONCURRENCY = 4
_WAITING_SHARE = 0.25
"""Share of its deadline that a call may wait for concurrent ones, as long as `_MIN_CONCURRENCY` calls are permitted."""
_log = logging.getLogger(__name__)


def run_worker(
    pipe: Connection, scratch: str, scenario: Scenario, request: CheckRequest, batches: Sequence[Feeds], times: Slowdown
) -> None:
    """The main function of the process, which sends a ScenarioResult or the first error.

    Args:
        pipe: the parent's end receives the result.
        scratch: folder for temporary files; it outlives the process.
        scenario: the scenario.
        request: names the model, which the process loads or connects to.
        batches: the queries, in turn.
        times: times of model and baseline.
    """
    tempfile.tempdir = scratch
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        with open_endpoint(request, request.model) as model:
            calls = [functools.partial(model.call, batch) for batch in encode_batches(model, batches)]
            for call in calls[:_WARM_UPS]:
                call()
            settings = _settings(scenario, request, times, model.concurrency)
            pipe.send(run_until_proven(scenario, calls, settings, functools.partial(_send_error, pipe)))
    except Exception as error:
        _send_error(pipe, error)


def measure(
    scenario: Scenario,
    request: CheckRequest,
    batches: Sequence[Feeds],
    times: Slowdown,
    worker: Callable[..., object] = run_worker,
) -> ScenarioResult:
    """Run one scenario for the model of a check, which a new process loads or connects to.

    Without a `rate` the Server scenario sends half as many queries per second as one caller of the baseline could, so
    that a slower model receives as many queries as a faster one.

    Args:
        scenario: the scenario.
        request: names the model and sets the bound.
        batches: the queries, in turn.
        times: times of model and baseline.
        worker: main function of the process.

    Raises:
        CompressorError: the first error of a call, or the process ended without a result.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with receiver, tempfile.TemporaryDirectory() as scratch:
        process = context.Process(target=worker, args=(sender, scratch, scenario, request, batches, times), daemon=True)
        try:
            with _interrupts_deferred():
                process.start()
            sender.close()  # else the pipe would stay open when the process ends
            result = receiver.recv()
        except EOFError as error:
            process.join()
            raise CompressorError(
                f"LoadGen, {scenario}: its process ended without a result (exit code {process.exitcode}); check that"
                " there is memory to load the model once more",
                code=ErrorCode.PROCESS_ENDED,
                scenario=scenario,
                exit_code=process.exitcode,
            ) from error
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
    if isinstance(result, CompressorError):
        raise result
    assert isinstance(result, ScenarioResult)
    _log.debug("%s: %s", scenario, result)
    return result


def _settings(scenario: Scenario, request: CheckRequest, times: Slowdown, concurrency: int) -> ScenarioSettings:
    """Settings of a scenario; `concurrency` is the maximum that is useful for the model."""
    waiting = _WAITING_SHARE * 1e3 * request.deadline
    return ScenarioSettings(
        batch=request.batch,
        p50=times.model_p50,
        bound=None if scenario == "Offline" else request.p99,
        rate=request.rate or 500 / times.baseline_p50,
        seconds=request.load_seconds,
        concurrency=max(_MIN_CONCURRENCY, min(concurrency, int(waiting / times.model_p50))),
    )


def _send_error(pipe: Connection, error: BaseException) -> None:
    """Send an error to the parent. Errors of libraries are replaced, since some cannot be pickled."""
    if not isinstance(error, CompressorError):
        error = CompressorError(f"{type(error).__name__}: {one_line(error)}", code=ErrorCode.CHECK_INTERRUPTED)
    pipe.send(error)


def _exit_with_parent() -> None:
    """End the process when the parent has ended, since nobody would end it later."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let processes started in the context ignore Ctrl-C, which a terminal sends to all: the parent ends them.

    The parent is interrupted at the end of the context, since a process that is starting reads its arguments from it.
    """
    resource_tracker.ensure_running()  # it would unblock interrupts while it starts
    with interrupts_deferred():
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit a mask, but no handler
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
