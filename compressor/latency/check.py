"""A latency check in phases: load both models, compare their outputs, time them in turn, run scenarios, confirm."""

from __future__ import annotations

import datetime
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

from compressor.config.check import CheckRequest
from compressor.environment import machine
from compressor.errors import CompressorError, ErrorCode, InputError, MismatchError
from compressor.latency import loadgen
from compressor.latency.baseline import Baseline, check_comparable, digest
from compressor.latency.endpoints import encode_batches, open_endpoint, open_source
from compressor.latency.local_engine import LocalEngine, prove_again
from compressor.latency.output_check import ANY, Outputs, check_finite, expected_outputs
from compressor.latency.request_batches import Batches, load_batches
from compressor.latency.streams import PROMPTS, CheckedModel, Stream, TokenSource, read_stream
from compressor.latency.verdict import CheckPhase, ScenarioResult, Slowdown, Verdict
from compressor.measure.timing import CONFIDENCE, alternate_calls, ratio_interval
from compressor.progress import Listener, NullListener, ProgressCallback
from compressor.results import Note, NoteCode
from graph_passes.errors import listed

_LABELS = {
    CheckPhase.LOADING: "loading the models",
    CheckPhase.COMPARING: "comparing the outputs",
    CheckPhase.TIMING: "timing",
    CheckPhase.CONFIRMING: "comparing the outputs again",
}
"""Progress lines of the phases; scenarios have a line each."""
_log = logging.getLogger(__name__)

Timer = Callable[..., Iterator[np.ndarray]]
"""A function that times two calls in turn, with the arguments of `compressor.measure.timing.alternate_calls`: it yields
the seconds of each call, `[2, call]`, for one pair of rounds after another."""


def check(request: CheckRequest, listener: Listener | None = None, timer: Timer = alternate_calls) -> Verdict:
    """Compare a model's outputs and then its times with those of a baseline.

    If a server or an engine fails while it is timed, the verdict has the measurements until then, and its `phase` and
    `interrupted` name the failure. LoadGen's scenarios run in separate processes, which import the program's main
    module: a script that requests them calls this function under `if __name__ == "__main__"`.

    Args:
        listener: receives the progress and the notes.
        timer: times both models in turn.

    Raises:
        MismatchError: a proof does not hold on this machine, or the outputs are wrong before or after timing.
        ServerError: the server does not respond, or lacks a model.
        InputError: the inputs or the baseline do not fit the model.
        TargetMissingError: a client or a runtime is not installed.
        UsageError: texts are given without a tokenizer, or the name of a model is malformed.
    """
    if request.scenarios:
        loadgen.library()  # raises if it is missing, before any work
    with ExitStack() as stack:
        return _Check(request, listener or NullListener(), stack).run(timer)


class _Check:
    """A check with its models, batches and rounds; the stack closes the models.

    `sides` are the model and the baseline, each with its encoded batches; a saved baseline is not among them. Models
    that generate have prompts in place of batches, and `streams` in place of `times`.
    """

    sides: Sequence[tuple[CheckedModel, Sequence[Any]]]

    def __init__(self, request: CheckRequest, listener: Listener, stack: ExitStack) -> None:
        self.request, self.listener, self.start = request, listener, time.perf_counter()
        self.scenarios: list[ScenarioResult] = []
        self.saved: Baseline | None = None
        self.streams: StreamTimes | None = None
        with self.phase(CheckPhase.LOADING):
            if request.streams:
                self.load_sources()
            else:
                self.load_endpoints(stack)
        self.model = self.sides[0][0]
        self.times = RoundTimes(None if self.saved is None else self.saved.rounds)

    def load_endpoints(self, stack: ExitStack) -> None:
        """Load models that compute their outputs at once, and the batches for them."""
        request, path = self.request, self.request.baseline_file
        model = stack.enter_context(open_endpoint(request, request.model))
        endpoints = [model]
        if path is not None:
            self.saved = Baseline.load(path)
        else:
            endpoints.append(stack.enter_context(open_endpoint(request, request.baseline)))
        self.batches = load_batches(model, request)
        if self.saved is not None and path is not None:
            check_comparable(self.saved, path, self.batches.feeds, model.host, force=request.force)
        self.sides = [(endpoint, encode_batches(endpoint, self.batches.feeds)) for endpoint in endpoints]

    def load_sources(self) -> None:
        """Load models that generate, and the prompts for them."""
        request = self.request
        sources = [open_source(request, name) for name in (request.model, request.baseline)]
        inputs = [sorted(source.prompt(0)) for source in sources]
        if inputs[0] != inputs[1]:
            text = (
                f"reads {listed(inputs[1])}, but {request.model} reads {listed(inputs[0])}; name two runs on one model"
            )
            raise InputError.of_file(request.baseline, text, ErrorCode.FILE_MISMATCH)
        drawn = min(sources, key=lambda source: source.vocabulary)  # whose tokens the larger vocabulary has too
        prompts = tuple(drawn.prompt(number) for number in range(PROMPTS))
        length, new = request.lengths
        self.batches = Batches(prompts, f"random prompts of {length} tokens, {new} new tokens")
        self.sides = [(source, prompts) for source in sources]
        self.streams = StreamTimes(sources)

    def phase(self, phase: CheckPhase) -> AbstractContextManager[ProgressCallback]:
        """The progress line of a phase."""
        _log.debug("phase %s", phase)
        return self.listener.stage(_LABELS[phase])

    def run(self, timer: Timer) -> Verdict:
        """All phases after loading; a failure of a server or an engine interrupts those that measure."""
        request = self.request
        if self.batches.random:
            text = "the inputs are random; times may differ on real inputs (--inputs)"
            self.listener.note(Note(text=text, code=NoteCode.RANDOM_INPUTS))
        engines = {side.name: side for side, _ in self.sides if isinstance(side, LocalEngine)}
        proofs = tuple(proof for engine in engines.values() for proof in prove_again(engine, self.listener))
        with self.phase(CheckPhase.COMPARING):
            reference = self.reference()
            # Greedy texts of two servers differ where two tokens are nearly equal, even with the same weights.
            expect = request.expect or (ANY if request.is_url else None)
            expected = expected_outputs(self.model, self.batches.feeds, reference, expect, request.tolerance)
            outputs = _outputs(*self.sides[0])
            agreement = expected.compare(self.model.name, outputs)
        phase, interrupted = CheckPhase.TIMING, ""
        try:
            self.time_rounds(timer)
            phase = CheckPhase.SCENARIOS
            self.run_scenarios()
            phase = CheckPhase.CONFIRMING
            with self.phase(phase):  # a model may change, or fail under load
                expected.compare(self.model.name, _outputs(*self.sides[0]))
            phase = CheckPhase.DONE
        except MismatchError:
            raise
        except CompressorError as error:
            interrupted = str(error)
        slowdown, first_token = self.slowdowns
        verdict = Verdict(
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            model=request.model,
            baseline=request.baseline,
            host=self.model.host,
            inputs=self.batches.source,
            batch=request.batch,
            seq=request.lengths[0] if request.streams else self.batches.length(request.seq),
            new_tokens=request.lengths[1] if request.streams else None,
            outputs=agreement,
            proofs=proofs,
            slowdown=slowdown,
            first_token=first_token,
            scenarios=tuple(self.scenarios),
            phase=phase,
            interrupted=interrupted,
            machine=machine(),
            seconds=round(time.perf_counter() - self.start, 3),
        )
        self.save_baseline(verdict, outputs)
        return verdict

    def reference(self) -> Sequence[Outputs]:
        """The outputs of the baseline."""
        if self.saved is not None:
            return self.saved.outputs
        baseline, requests = self.sides[1]
        outputs = _outputs(baseline, requests)
        for number, batch in enumerate(outputs):
            check_finite(baseline.name, number, batch)
        return outputs

    def time_rounds(self, timer: Timer) -> None:
        """Time model and baseline in turn, or the model alone where the baseline is saved."""
        callers: Sequence[Callable[[], object]]
        if self.streams is None:
            callers, add = [_caller(*side) for side in self.sides], self.times.add
        else:
            callers, add = self.streams.callers(), self.streams.add

        def undecided() -> bool:
            limit = self.request.max_slowdown
            return any(slowdown is not None and slowdown.low <= limit < slowdown.high for slowdown in self.slowdowns)

        with self.phase(CheckPhase.TIMING) as on_progress:
            wait = self.model.wait_until_idle
            seconds = self.request.seconds
            for pair in timer(
                callers[0], callers[-1], seconds, wait=wait, needs_more=undecided, on_progress=on_progress
            ):
                add(1e3 * pair)

    @property
    def slowdowns(self) -> tuple[Slowdown | None, Slowdown | None]:
        """The slowdowns over the rounds so far: of calls and none, or of each token and of the first one."""
        limit, seed = self.request.max_slowdown, self.request.seed
        return (self.times.slowdown(limit, seed), None) if self.streams is None else self.streams.slowdowns(limit, seed)

    def run_scenarios(self) -> None:
        """Run LoadGen's scenarios, each in a separate process."""
        slowdown, _ = self.slowdowns
        if slowdown is None:
            return
        for scenario in self.request.scenarios:
            with self.listener.stage(f"LoadGen, {scenario}"):
                self.scenarios.append(loadgen.measure(scenario, self.request, self.batches.feeds, slowdown))

    def save_baseline(self, verdict: Verdict, outputs: Sequence[Outputs]) -> None:
        """Write the baseline file of a check that passed, where one is requested."""
        path = self.request.save_baseline
        if path is None:
            return
        if not verdict.passed:
            text = f"{path} is not written: the check did not pass"
            self.listener.note(Note(text=text, code=NoteCode.BASELINE_NOT_SAVED))
            return
        Baseline(
            model=self.model.name,
            host=verdict.host,
            inputs=digest(self.batches.feeds),
            batch=verdict.batch,
            seq=verdict.seq,
            times=tuple(tuple(calls.tolist()) for calls in self.times.model),
            outputs=tuple(outputs),
            machine=verdict.machine,
        ).save(path)


def _outputs(endpoint: CheckedModel, requests: Sequence[Any]) -> list[Outputs]:
    return [endpoint.infer(request) for request in requests]


def _caller(endpoint: Any, requests: Sequence[Any]) -> Callable[[], object]:
    batches = itertools.cycle(requests)
    return lambda: endpoint.call(next(batches))


_RESAMPLES = 2000


class RoundTimes:
    """Milliseconds of calls, one array `[call]` per round.

    Args:
        saved: rounds of a baseline that was measured earlier; None: both sides are measured in turn.

    Attributes:
        model: the rounds of the model.
        baseline: the rounds of the baseline.
        interleaved: whether rounds of model and baseline alternate.
    """

    def __init__(self, saved: Sequence[np.ndarray] | None = None) -> None:
        self.model: list[np.ndarray] = []
        self.baseline: list[np.ndarray] = list(saved or ())
        self.interleaved = saved is None

    def add(self, pair: np.ndarray) -> None:
        """Add two rounds `[2, call]`: of model and baseline, or both of the model where the baseline is saved."""
        self.model.append(pair[0])
        (self.baseline if self.interleaved else self.model).append(pair[1])

    def slowdown(self, limit: float, seed: int) -> Slowdown | None:
        """The slowdown over all rounds; None before the first."""
        if not self.model:
            return None
        model, baseline = np.stack(self.model), np.stack(self.baseline)
        if self.interleaved:
            low, high = ratio_interval(np.stack([model, baseline]), seed)
        else:
            low, high = _unpaired_interval(model, baseline, seed)
        ratio = float(np.median(model) / np.median(baseline))
        (baseline_p50, baseline_p99), (model_p50, model_p99) = (
            np.quantile(side, [0.5, 0.99]) for side in (baseline, model)
        )
        return Slowdown(
            baseline_p50=baseline_p50,
            model_p50=model_p50,
            baseline_p99=baseline_p99,
            model_p99=model_p99,
            slowdown=ratio - 1,
            low=min(low, ratio) - 1,
            high=max(high, ratio) - 1,
            confidence=CONFIDENCE,
            limit=limit,
            rounds=len(model),
            calls=model.shape[1],
            interleaved=self.interleaved,
        )


def _unpaired_interval(model: np.ndarray, baseline: np.ndarray, seed: int) -> tuple[float, float]:
    """Bootstrap bounds of the ratio of medians of two sides that were measured at different times."""
    rng = np.random.default_rng(seed)
    # The medians of all draws at once would take gigabytes for many long rounds.
    medians = [
        np.array([np.median(side[draw]) for draw in rng.integers(0, len(side), (_RESAMPLES, len(side)))])
        for side in (model, baseline)
    ]
    low, high = np.quantile(medians[0] / medians[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


class StreamTimes:
    """Times of the streams of two sources, in pairs of rounds.

    Attributes:
        first: milliseconds to the first token.
        token: milliseconds per further token.
    """

    def __init__(self, sources: Sequence[TokenSource]) -> None:
        self.first, self.token = RoundTimes(), RoundTimes()
        self._sources = sources
        self._streams: tuple[list[Stream], list[Stream]] = ([], [])
        self._gaps: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])

    def callers(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """For each source a function that reads the stream of the next prompt."""

        def caller(source: TokenSource, streams: list[Stream]) -> Callable[[], object]:
            # Servers keep what they have computed for a prompt, so each one is new.
            numbers = itertools.count(PROMPTS)
            return lambda: streams.append(read_stream(source, source.prompt(next(numbers))))

        first, second = zip(self._sources, self._streams, strict=True)
        return caller(*first), caller(*second)

    def add(self, pair: np.ndarray) -> None:
        """Add two rounds `[2, call]`, whose streams are the last ones that were read."""
        rounds = [streams[-pair.shape[1] :] for streams in self._streams]
        self.first.add(np.array([[stream.first for stream in streams] for streams in rounds]))
        self.token.add(np.array([[stream.per_token for stream in streams] for streams in rounds]))
        for gaps, streams in zip(self._gaps, rounds, strict=True):
            gaps.extend(stream.gaps for stream in streams)

    def slowdowns(self, limit: float, seed: int) -> tuple[Slowdown | None, Slowdown | None]:
        """The slowdowns per further token and to the first one; None before the first round.

        The 99th percentiles of further tokens are those of the time between two parts of a text.
        """
        first, token = self.first.slowdown(limit, seed), self.token.slowdown(limit, seed)
        if token is not None:
            model, baseline = (float(np.quantile(np.concatenate(gaps), 0.99)) for gaps in self._gaps)
            token = token.model_copy(update={"model_p99": model, "baseline_p99": baseline})
        return token, first
