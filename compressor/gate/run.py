"""A check: right answers first, then the two in turn, then absolute bounds."""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import InputError, ServerError, UsageError
from compressor.gate import answers, load, record
from compressor.gate.drivers import Driver
from compressor.gate.inputs import batches
from compressor.gate.load import Scenario
from compressor.gate.local import Local
from compressor.gate.server import Server
from compressor.gate.times import Times
from compressor.gate.verdict import Load, Slowdown, Verdict
from compressor.machine import machine
from compressor.measure.timing import turns
from compressor.progress import Listener, Silent
from compressor.targets.base import Feeds


@dataclass(frozen=True)
class Asked:
    """What to check.

    Attributes:
        model, baseline: names of models on the server; without one, ONNX files. A baseline may be the `.json` that an
            earlier check saved.
        server: `grpc://host:port` or `http://host:port`.
        max_slowdown: largest that is allowed, as a share: 0.05.
        p99: bound on the 99th percentile, in milliseconds.
        scenarios: of LoadGen; with a bound and none named, SingleStream.
        rate: queries a second of the Server scenario.
        inputs, tokenizer: see `compressor.gate.inputs.batches`.
        batch, seq: rows of a batch; tokens of a row.
        seconds: about how long the two are timed.
        load_seconds: least duration of a scenario.
        expect, tolerance: see `compressor.gate.answers.require`.
        deadline: seconds that any one call to the server may take.
        threads, kernel: of the engines on this machine; see `compressor.targets.Tuning`.
        seed: of what is drawn.
        force: compare with a baseline that another machine measured.
        save_baseline: file to keep what is measured of the model in.
    """

    model: str
    baseline: str
    server: str | None = None
    max_slowdown: float = 0.05
    p99: float | None = None
    scenarios: tuple[Scenario, ...] = ()
    rate: float | None = None
    inputs: Path | None = None
    tokenizer: Path | None = None
    batch: int = 1
    seq: int = 128
    seconds: float = 20.0
    load_seconds: float = 5.0
    expect: str | None = None
    tolerance: float | None = None
    deadline: float = 10.0
    threads: int | None = None
    kernel: Path | None = None
    seed: int = 0
    force: bool = False
    save_baseline: Path | None = None

    def __post_init__(self) -> None:
        """Raises:
        UsageError: a number that is none or out of range, or options that say nothing together.
        """
        least = {"max_slowdown": 0.0, "seconds": 0.0, "load_seconds": 0.0, "deadline": 0.0, "batch": 1, "seq": 1}
        least |= {"p99": 0.0, "rate": 0.0, "tolerance": 0.0}
        for name, low in least.items():
            value = getattr(self, name)
            zero = value == 0 and name not in ("max_slowdown", "tolerance")
            if value is not None and (not np.isfinite(value) or value < low or zero):
                raise UsageError(f"{name} {value!r}: give a finite number {'from' if not zero else 'above'} {low:g}")
        if self.p99 is not None and self.scenarios == ("Offline",):
            raise UsageError("p99: the offline scenario has no bound; add singlestream or server")
        if self.rate is not None and "Server" not in self.scenarios:
            raise UsageError("rate: it is that of the server scenario; add it (--scenario server)")
        if self.server and self.kernel is not None:
            raise UsageError(f"--kernel {self.kernel}: is for engines on this machine; leave it out, or --server")
        if self.server and self.server.startswith("http://") and self.loads:
            raise UsageError("LoadGen's scenarios need calls side by side, which the HTTP client has not; use grpc://")

    @property
    def loads(self) -> tuple[Scenario, ...]:
        return self.scenarios or (("SingleStream",) if self.p99 is not None else ())


def check(asked: Asked, listener: Listener | None = None) -> Verdict:
    """Compare the answers, then time.

    A server that dies while it is timed leaves a verdict of what was measured until then, with `interrupted`.

    Raises:
        MismatchError: wrong answers; nothing was timed.
        ServerError: the server is not there, or lacks a model.
        InputError: inputs or a baseline that do not fit.
        TargetMissingError: a client is not installed.
        UsageError: what is asked for contradicts itself.
    """
    listener, began = listener or Silent(), time.perf_counter()
    if asked.loads:
        load.library()
    with ExitStack() as stack:
        with listener.stage("loading the models"):
            model = _driver(stack, asked, asked.model)
            saved = record.Baseline.load(Path(asked.baseline)) if asked.baseline.endswith(".json") else None
            base = None if saved is not None else _driver(stack, asked, asked.baseline)
            feeds, told = batches(model, asked.inputs, asked.tokenizer, asked.batch, asked.seq, asked.seed)
            if asked.inputs is None:
                listener.note("inputs are drawn at random; --inputs gives the model real ones, whose times count")
        if saved is not None:
            _same(saved, asked, feeds, model.host)
        with listener.stage("comparing the answers"):
            asks = _prepared(model, feeds)
            base_asks = None if base is None else _prepared(base, feeds)
            if base is not None and base_asks is not None:
                wanted = [base.answers(batch) for batch in base_asks]
                for number, given in enumerate(wanted):
                    answers.sensible(base.name, number, given)
            else:
                assert saved is not None
                wanted = [record.unpacked(outputs) for outputs in saved.answers]
            outputs, right = answers.require(model, feeds, asks, wanted, asked.expect, asked.tolerance)
        interrupted, times = "", Times()
        call = _cycle(model, asks)
        other = call if base is None or base_asks is None else _cycle(base, base_asks)
        with listener.stage("timing") as tell:
            try:
                for pair in turns(call, other, asked.seconds, rest=model.rest, tell=tell):
                    times.add(1e3 * pair, saved is None)
            except ServerError as error:
                interrupted = str(error)
        before = None if saved is None else [np.array(block) for block in saved.times]
        slowdown = times.slowdown(before, asked.max_slowdown, asked.seed)
        loads: list[Load] = []
        for scenario in asked.loads:
            if interrupted or slowdown is None:
                break
            with listener.stage(f"LoadGen, {scenario}"):
                try:
                    loads.append(_load(scenario, model, asks, asked, slowdown))
                except ServerError as error:
                    interrupted = str(error)
                    break
        found = Verdict(
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            model=asked.model,
            baseline=asked.baseline,
            host=model.host,
            inputs=told,
            batch=asked.batch,
            seq=asked.seq,
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
            record.Baseline(
                model=model.name,
                host=model.host,
                inputs=_digest(feeds),
                batch=asked.batch,
                seq=asked.seq,
                times=tuple(tuple(block.tolist()) for block in times.model),
                answers=tuple(record.packed(batch) for batch in outputs),
                machine=machine(),
            ).save(asked.save_baseline)
        return found


def _driver(stack: ExitStack, asked: Asked, name: str) -> Driver:
    if asked.server is not None:
        driver: Driver = Server(asked.server, name, asked.deadline)
    else:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        driver = Local(Path(name), scratch, asked.threads, asked.kernel)
    stack.callback(driver.close)
    return driver


def _prepared(driver: Driver, feeds: Sequence[Feeds]) -> list[Any]:
    for tensor in driver.inputs:
        given = feeds[0].get(tensor.name)
        if given is None or given.dtype != tensor.numpy:
            said = "is missing" if given is None else f"is {given.dtype}"
            raise InputError(
                f"{driver.name}: its input {tensor.name} ({tensor.numpy}) {said} in what the other model takes; the two"
                " must have the same inputs"
            )
    return [driver.prepare(batch) for batch in feeds]


def _cycle(driver: Driver, asks: Sequence[Any]) -> Callable[[], object]:
    turn: Iterator[Any] = itertools.cycle(asks)
    return lambda: driver.call(next(turn))


def _load(scenario: Scenario, model: Driver, asks: Sequence[Any], asked: Asked, slowdown: Slowdown) -> Load:
    calls = [functools.partial(model.call, batch) for batch in asks]
    bound = None if scenario == "Offline" else asked.p99
    return load.measure(
        scenario,
        calls,
        batch=asked.batch,
        p50=slowdown.model_p50,
        bound=bound,
        rate=asked.rate,
        seconds=asked.load_seconds,
    )


def _same(saved: record.Baseline, asked: Asked, feeds: Sequence[Feeds], host: str) -> None:
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


def _digest(feeds: Sequence[Feeds]) -> str:
    found = hashlib.sha256()
    for batch in feeds:
        for name, array in sorted(batch.items()):
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
    return f"sha256:{found.hexdigest()}"
