"""A scenario of LoadGen in a process of its own: LoadGen itself cannot be stopped, a process can.

It keeps to its schedule however many queries fail. Here the first fault is told at once, and the process is ended.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

from compressor.config.check import CheckRequest, Scenario
from compressor.errors import CompressorError
from compressor.latency import loadgen
from compressor.latency.endpoints import encode_batches, open_endpoint
from compressor.latency.verdict import Load, Slowdown
from compressor.silence_libraries import one_line
from compressor.targets.base import Feeds

_WARM_UPS = 3
"""Calls that are not counted: a process's first ones, and an engine's, take longer."""
_AT_ONCE = 4
_OF_DEADLINE = 0.25
"""How much of its deadline a call may wait for others that are under way; `_AT_ONCE` may be in any case."""


def measure(scenario: Scenario, asked: CheckRequest, feeds: Sequence[Feeds], times: Slowdown) -> Load:
    """Run one scenario of the model that is asked for, which the process loads or connects to anew.

    Args:
        feeds: the queries, taken in turn.
        times: what was measured of the two. Without a `rate` the Server scenario sends half as many queries a second as
            one caller of the baseline could: as many to a slower model as to a faster one.

    Raises:
        CompressorError: what a call raised first, or that the process ended before its time.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    with here, tempfile.TemporaryDirectory() as scratch:
        process = context.Process(target=_run, args=(there, scratch, scenario, asked, feeds, times), daemon=True)
        try:
            with _interrupts_held():
                process.start()
            there.close()  # else the pipe would stay open when the process ends
            found = here.recv()
        except EOFError as error:
            process.join()
            raise CompressorError(
                f"LoadGen, {scenario}: its process ended before its time (code {process.exitcode}); is there memory to"
                " load the model once more?"
            ) from error
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
    if isinstance(found, CompressorError):
        raise found
    assert isinstance(found, Load)
    return found


def _run(
    pipe: Connection, scratch: str, scenario: Scenario, asked: CheckRequest, feeds: Sequence[Feeds], times: Slowdown
) -> None:
    """The process. What it writes is in `scratch`, which outlives it."""
    tempfile.tempdir = scratch
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with open_endpoint(asked, asked.model) as model:
            calls = [functools.partial(model.call, batch) for batch in encode_batches(model, feeds)]
            for call in calls[:_WARM_UPS]:
                call()
            run = functools.partial(
                loadgen.measure,
                scenario,
                calls,
                batch=asked.batch,
                p50=times.model_p50,
                bound=None if scenario == "Offline" else asked.p99,
                rate=asked.rate or 500 / times.baseline_p50,
                seconds=asked.load_seconds,
                at_once=max(_AT_ONCE, min(model.at_once, int(_OF_DEADLINE * 1e3 * asked.deadline / times.model_p50))),
                on_fault=lambda error: pipe.send(_told(error)),
            )
            found = run()
            pipe.send(run(fewest=loadgen.MORE) if found.unproven else found)
    except Exception as error:
        pipe.send(_told(error))


def _told(error: BaseException) -> CompressorError:
    """An error that can be sent: those of libraries may hold what cannot."""
    if isinstance(error, CompressorError):
        return error
    return CompressorError(f"{type(error).__name__}: {one_line(error)}")


def _end_with_parent() -> None:
    """Nobody would end the process later."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """What is started here never hears of Ctrl-C, which a terminal sends to every process: the parent ends it."""
    resource_tracker.ensure_running()  # it would let interrupts through as it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
