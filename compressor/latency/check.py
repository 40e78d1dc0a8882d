"""A check: right answers first, then the two in turn, then absolute bounds."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from compressor.config.check import CheckRequest
from compressor.environment import machine
from compressor.errors import CompressorError, InputError, MismatchError
from compressor.latency import loadgen, loadgen_process, output_check
from compressor.latency.baseline import Baseline
from compressor.latency.endpoints import Endpoint, encode_batches, open_endpoint
from compressor.latency.request_batches import batches
from compressor.latency.round_times import Times
from compressor.latency.verdict import Load, Verdict
from compressor.measure.timing import alternate_calls
from compressor.progress import Listener, NullListener
from compressor.targets.base import Feeds


def check(asked: CheckRequest, listener: Listener | None = None) -> Verdict:
    """Compare the answers, then time.

    A server or an engine that fails while it is timed leaves a verdict of what was measured until then, with
    `interrupted`. LoadGen's scenarios run in a process of their own, which imports the program's main module: a script
    that asks for them calls this under `if __name__ == "__main__"`.

    Raises:
        MismatchError: wrong answers, before anything was timed or after it: then the times count for nothing.
        ServerError: the server is not there, or lacks a model.
        InputError: inputs or a baseline that do not fit.
        TargetMissingError: a client is not installed.
        UsageError: what is asked for contradicts itself.
    """
    listener, began = listener or NullListener(), time.perf_counter()
    if asked.loads:
        loadgen.library()
    with ExitStack() as stack:
        with listener.stage("loading the models"):
            model = stack.enter_context(open_endpoint(asked, asked.model))
            saved = Baseline.load(Path(asked.baseline)) if asked.baseline.endswith(".json") else None
            base = None if saved is not None else stack.enter_context(open_endpoint(asked, asked.baseline))
            feeds, told = batches(model, asked)
            seq = max((array.shape[1] for array in feeds[0].values() if array.ndim > 1), default=asked.seq)
            if asked.inputs is None:
                listener.note("inputs are drawn at random; --inputs gives the model real ones, whose times count")
        if saved is not None:
            _same(saved, asked, feeds, model.host)
        with listener.stage("comparing the answers"):
            asks = encode_batches(model, feeds)
            base_asks = None if base is None else encode_batches(base, feeds)
            if base is not None and base_asks is not None:
                wanted = [base.answers(batch) for batch in base_asks]
                for number, given in enumerate(wanted):
                    output_check.require_finite(base.name, number, given)
            else:
                assert saved is not None
                wanted = list(saved.answers)
            judged = output_check.judge(model, feeds, wanted, asked.expect, asked.tolerance)
            outputs = [model.answers(batch) for batch in asks]
            right = judged(outputs)
        interrupted, times = "", Times()
        call = _cycle(model, asks)
        other = call if base is None or base_asks is None else _cycle(base, base_asks)
        before = None if saved is None else [np.array(block) for block in saved.times]

        def undecided() -> bool:
            found = times.slowdown(before, asked.max_slowdown, asked.seed)
            return found is not None and found.low <= asked.max_slowdown < found.high

        with listener.stage("timing") as tell:
            try:
                for pair in alternate_calls(
                    call, other, asked.seconds, rest=model.rest, undecided=undecided, tell=tell
                ):
                    times.add(1e3 * pair, saved is None)
            except CompressorError as error:
                interrupted = str(error)
        slowdown = times.slowdown(before, asked.max_slowdown, asked.seed)
        loads: list[Load] = []
        for scenario in asked.loads:
            if interrupted or slowdown is None:
                break
            with listener.stage(f"LoadGen, {scenario}"):
                try:
                    loads.append(loadgen_process.measure(scenario, asked, feeds, slowdown))
                except CompressorError as error:
                    interrupted = str(error)
        if not interrupted:
            try:
                judged([model.answers(batch) for batch in asks])
            except MismatchError:
                raise
            except CompressorError as error:
                interrupted = str(error)
        found = Verdict(
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            model=asked.model,
            baseline=asked.baseline,
            host=model.host,
            inputs=told,
            batch=asked.batch,
            seq=seq,
            answers=right,
            slowdown=slowdown,
            loads=tuple(loads),
            interrupted=interrupted,
            machine=machine(),
            seconds=round(time.perf_counter() - began, 3),
        )
        if asked.save_baseline is not None and not found.passed:
            listener.note(f"{asked.save_baseline} is not written: the check did not pass")
        elif asked.save_baseline is not None:
            Baseline(
                model=model.name,
                host=model.host,
                inputs=_digest(feeds),
                batch=asked.batch,
                seq=seq,
                times=tuple(tuple(block.tolist()) for block in times.model),
                answers=tuple(outputs),
                machine=machine(),
            ).save(asked.save_baseline)
        return found


def _cycle(driver: Endpoint, asks: Sequence[Any]) -> Callable[[], object]:
    turn: Iterator[Any] = itertools.cycle(asks)
    return lambda: driver.call(next(turn))


def _same(saved: Baseline, asked: CheckRequest, feeds: Sequence[Feeds], host: str) -> None:
    """Raise InputError where times of a saved baseline must not be compared with new ones."""
    elsewhere = saved.elsewhere(host)
    if elsewhere and not asked.force:
        raise InputError(
            f"{asked.baseline}: measured on another machine ({elsewhere}); measure it here (--save-baseline), or"
            " --force to compare all the same"
        )
    if saved.inputs != _digest(feeds):
        raise InputError(
            f"{asked.baseline}: measured on other inputs (batch {saved.batch}, {saved.seq} tokens); give the same"
            " --inputs, --batch, --seq and --seed, or measure it again"
        )
    if len(saved.answers) != len(feeds):
        raise InputError(
            f"{asked.baseline}: has answers to {len(saved.answers)} of {len(feeds)} batches; measure it again"
        )


def _digest(feeds: Sequence[Feeds]) -> str:
    found = hashlib.sha256()
    for batch in feeds:
        for name, array in sorted(batch.items()):
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(repr(array.tolist()).encode() if array.dtype == np.object_ else array.tobytes())
    return f"sha256:{found.hexdigest()}"
