"""A latency check in phases: load both models, compare their outputs, time them in turn, run scenarios, confirm."""

from __future__ import annotations

import datetime
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from compressor.config.check import CheckRequest
from compressor.environment import machine
from compressor.errors import CompressorError, MismatchError
from compressor.latency import loadgen, loadgen_process
from compressor.latency.baseline import Baseline, check_comparable, digest
from compressor.latency.endpoints import Endpoint, encode_batches, open_endpoint
from compressor.latency.local_engine import LocalEngine
from compressor.latency.output_check import ExpectedOutputs, Outputs, check_finite, expected_outputs
from compressor.latency.prove_again import prove_again
from compressor.latency.request_batches import Batches, load_batches
from compressor.latency.round_times import RoundTimes
from compressor.latency.verdict import CheckPhase, OutputAgreement, ScenarioResult, Slowdown, Verdict
from compressor.measure.timing import alternate_calls
from compressor.progress import Listener, NullListener, ProgressCallback
from compressor.results import Note, NoteCode, Proof

_LABELS = {
    CheckPhase.LOADING: "loading the models",
    CheckPhase.COMPARING: "comparing the outputs",
    CheckPhase.TIMING: "timing",
    CheckPhase.CONFIRMING: "comparing the outputs again",
}
"""Progress lines of the phases; scenarios have a line each."""
_log = logging.getLogger(__name__)


class Timer(Protocol):
    """A function that times two calls in turn, such as `compressor.measure.timing.alternate_calls`."""

    def __call__(
        self,
        first: Callable[[], object],
        second: Callable[[], object],
        seconds: float,
        /,
        *,
        wait: Callable[[], None],
        needs_more: Callable[[], bool],
        on_progress: ProgressCallback,
    ) -> Iterator[np.ndarray]:
        """Yield the seconds of each call, `[2, call]`, for one pair of rounds after another."""
        ...


@dataclass(frozen=True)
class _Side:
    """One side of the comparison: a model, and the batches in the form that it takes."""

    endpoint: Endpoint
    requests: Sequence[Any]

    def outputs(self) -> list[Outputs]:
        """The outputs of every batch."""
        return [self.endpoint.infer(request) for request in self.requests]

    def caller(self) -> Callable[[], object]:
        """A function that sends the next batch at each call, in turn."""
        requests: Iterator[Any] = itertools.cycle(self.requests)
        return lambda: self.endpoint.call(next(requests))


@dataclass(frozen=True)
class _Comparison:
    """The model of a check and what it is compared with: a second model, or a saved baseline."""

    request: CheckRequest
    batches: Batches
    model: _Side
    baseline: _Side | Baseline

    @property
    def seq(self) -> int:
        return self.batches.length(self.request.seq)


@dataclass
class _Measurements:
    """The measurements of a check so far, and its present phase."""

    times: RoundTimes
    scenarios: list[ScenarioResult]
    phase: CheckPhase = CheckPhase.TIMING
    interrupted: str = ""


def check(request: CheckRequest, listener: Listener | None = None, timer: Timer = alternate_calls) -> Verdict:
    """Compare a model's outputs and then its times with those of a baseline.

    If a server or an engine fails while it is timed, the verdict contains what was measured until then; its `phase` and
    `interrupted` say so. LoadGen's scenarios run in a process of their own, which imports the program's main
    module: a script that requests them calls this function under `if __name__ == "__main__"`.

    Args:
        request: what to check and against which bounds.
        listener: receives the progress and the notes.
        timer: times both models in turn.

    Raises:
        MismatchError: a proof does not hold on this machine, or the outputs are wrong: before timing, or after it; then
            the times are void.
        ServerError: the server does not respond, or lacks a model.
        InputError: the inputs or the baseline do not fit the model.
        TargetMissingError: a client or a runtime is not installed.
        UsageError: texts are given without a tokenizer, or the name of a model is malformed.
    """
    listener, start = listener or NullListener(), time.perf_counter()
    if request.scenarios:
        loadgen.library()  # raises before any work if it is missing
    with ExitStack() as stack:
        with _phase(CheckPhase.LOADING, listener):
            comparison = _load(request, stack)
        if comparison.batches.random:
            listener.note(
                Note(
                    text="the inputs are random; --inputs sends the model real ones, whose times count",
                    code=NoteCode.RANDOM_INPUTS,
                )
            )
        proofs = _prove_again(comparison, listener)
        with _phase(CheckPhase.COMPARING, listener):
            expected, outputs, agreement = _compare_outputs(comparison)
        measured = _measure(comparison, expected, listener, timer)
        verdict = _verdict(comparison, agreement, measured, proofs, time.perf_counter() - start)
        _save_baseline(comparison, verdict, outputs, measured.times, listener)
    return verdict


def _phase(phase: CheckPhase, listener: Listener) -> AbstractContextManager[ProgressCallback]:
    """The progress line of a phase."""
    _log.debug("phase %s", phase)
    return listener.stage(_LABELS[phase])


def _load(request: CheckRequest, stack: ExitStack) -> _Comparison:
    """Open the models and read the batches; the stack closes the models."""
    model = stack.enter_context(open_endpoint(request, request.model))
    if request.baseline_file is not None:
        saved = Baseline.load(request.baseline_file)
        batches = load_batches(model, request)
        check_comparable(saved, request.baseline_file, batches.feeds, model.host, force=request.force)
        return _Comparison(request, batches, _Side(model, encode_batches(model, batches.feeds)), saved)
    baseline = stack.enter_context(open_endpoint(request, request.baseline))
    batches = load_batches(model, request)
    sides = [_Side(endpoint, encode_batches(endpoint, batches.feeds)) for endpoint in (model, baseline)]
    return _Comparison(request, batches, *sides)


def _prove_again(comparison: _Comparison, listener: Listener) -> tuple[Proof, ...]:
    """The proofs of engines in int8 or bfloat16 on this machine that were proven on another one."""
    endpoints = [side.endpoint for side in (comparison.model, comparison.baseline) if isinstance(side, _Side)]
    engines = {endpoint.name: endpoint for endpoint in endpoints if isinstance(endpoint, LocalEngine)}
    return tuple(proof for engine in engines.values() for proof in prove_again(engine, listener))


def _compare_outputs(comparison: _Comparison) -> tuple[ExpectedOutputs, list[Outputs], OutputAgreement]:
    """The expected outputs, the model's outputs, and how far they agree."""
    request, baseline, model = comparison.request, comparison.baseline, comparison.model
    if isinstance(baseline, Baseline):
        reference: Sequence[Outputs] = baseline.outputs
    else:
        reference = baseline.outputs()
        for number, batch in enumerate(reference):
            check_finite(baseline.endpoint.name, number, batch)
    expected = expected_outputs(model.endpoint, comparison.batches.feeds, reference, request.expect, request.tolerance)
    outputs = model.outputs()
    return expected, outputs, expected.compare(model.endpoint.name, outputs)


def _measure(comparison: _Comparison, expected: ExpectedOutputs, listener: Listener, timer: Timer) -> _Measurements:
    """Run the phases that measure; an error interrupts them and is recorded."""
    saved = comparison.baseline.rounds if isinstance(comparison.baseline, Baseline) else None
    measured = _Measurements(RoundTimes(saved), [])
    try:
        measured.phase = CheckPhase.TIMING
        _time_rounds(comparison, measured.times, listener, timer)
        measured.phase = CheckPhase.SCENARIOS
        _run_scenarios(comparison, measured, listener)
        measured.phase = CheckPhase.CONFIRMING
        _confirm_outputs(comparison, expected, listener)
        measured.phase = CheckPhase.DONE
    except MismatchError:
        raise
    except CompressorError as error:
        measured.interrupted = str(error)
    return measured


def _time_rounds(comparison: _Comparison, times: RoundTimes, listener: Listener, timer: Timer) -> None:
    """Time model and baseline in turn, or the model alone where the baseline is saved."""
    request, model = comparison.request, comparison.model
    call = model.caller()
    second = call if isinstance(comparison.baseline, Baseline) else comparison.baseline.caller()

    def undecided() -> bool:
        slowdown = _slowdown(request, times)
        return slowdown is not None and slowdown.low <= request.max_slowdown < slowdown.high

    with _phase(CheckPhase.TIMING, listener) as on_progress:
        rounds = timer(
            call,
            second,
            request.seconds,
            wait=model.endpoint.wait_until_idle,
            needs_more=undecided,
            on_progress=on_progress,
        )
        for pair in rounds:
            times.add(1e3 * pair)


def _run_scenarios(comparison: _Comparison, measured: _Measurements, listener: Listener) -> None:
    """Run LoadGen's scenarios, each in a process of its own."""
    request, slowdown = comparison.request, _slowdown(comparison.request, measured.times)
    if slowdown is None:
        return
    for scenario in request.scenarios:
        with listener.stage(f"LoadGen, {scenario}"):
            result = loadgen_process.measure(scenario, request, comparison.batches.feeds, slowdown)
            measured.scenarios.append(result)


def _confirm_outputs(comparison: _Comparison, expected: ExpectedOutputs, listener: Listener) -> None:
    """Compare the outputs once more: a model may change, or fail under load."""
    with _phase(CheckPhase.CONFIRMING, listener):
        expected.compare(comparison.model.endpoint.name, comparison.model.outputs())


def _slowdown(request: CheckRequest, times: RoundTimes) -> Slowdown | None:
    return times.slowdown(request.max_slowdown, request.seed)


def _verdict(
    comparison: _Comparison,
    agreement: OutputAgreement,
    measured: _Measurements,
    proofs: tuple[Proof, ...],
    seconds: float,
) -> Verdict:
    request = comparison.request
    return Verdict(
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model=request.model,
        baseline=request.baseline,
        host=comparison.model.endpoint.host,
        inputs=comparison.batches.source,
        batch=request.batch,
        seq=comparison.seq,
        outputs=agreement,
        proofs=proofs,
        slowdown=_slowdown(request, measured.times),
        scenarios=tuple(measured.scenarios),
        phase=measured.phase,
        interrupted=measured.interrupted,
        machine=machine(),
        seconds=round(seconds, 3),
    )


def _save_baseline(
    comparison: _Comparison, verdict: Verdict, outputs: Sequence[Outputs], times: RoundTimes, listener: Listener
) -> None:
    """Write the baseline file of a check that passed, where one is requested."""
    path = comparison.request.save_baseline
    if path is None:
        return
    if not verdict.passed:
        listener.note(Note(text=f"{path} is not written: the check did not pass", code=NoteCode.BASELINE_NOT_SAVED))
        return
    Baseline(
        model=comparison.model.endpoint.name,
        host=verdict.host,
        inputs=digest(comparison.batches.feeds),
        batch=verdict.batch,
        seq=verdict.seq,
        times=tuple(tuple(calls.tolist()) for calls in times.model),
        outputs=tuple(outputs),
        machine=verdict.machine,
    ).save(path)
