"""The result of a latency check as data, which its text, JSON, JUnit report and history line derive from."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from compressor.environment import COMPARABLE_FIELDS
from compressor.results import Proof

FIRST_TOKEN, SLOWDOWN = "first token", "slowdown"
"""Names of the comparisons of times."""


class _Record(BaseModel):
    # Unknown keys are ignored: a history may hold lines that a later version wrote.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class CheckPhase(StrEnum):
    """The phases of a check, in order."""

    LOADING = "loading"
    COMPARING = "comparing"
    """Outputs are compared with the expected outputs."""
    TIMING = "timing"
    SCENARIOS = "scenarios"
    """LoadGen's scenarios run."""
    CONFIRMING = "confirming"
    """Outputs are compared again."""
    DONE = "done"


class Outcome(StrEnum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class OutputAgreement(_Record):
    """How close a model's outputs are to the expected outputs, over all batches.

    Attributes:
        expected: the origin of the expected outputs.
        error: largest relative error; None where only shapes and types are compared.
        tolerance: maximum relative error.
        batches: number of batches compared.
    """

    expected: str
    error: float | None
    tolerance: float
    batches: int


class Slowdown(_Record):
    """Median time of the model over that of the baseline, minus one, with a bootstrap interval over rounds.

    The times are those of calls. Of a model that generates, they are those from a prompt to the first token, or those
    per further token, whose 99th percentiles are of the time between two parts of a text.

    Attributes:
        baseline_p50, model_p50, baseline_p99, model_p99: quantiles of all calls, in milliseconds.
        slowdown: the ratio of the medians minus one; `low` and `high` bound it at `confidence`.
        limit: maximum slowdown.
        rounds: number of rounds of each side; a round has `calls` timed calls.
        interleaved: whether the rounds of both sides alternate; False where the baseline was measured earlier.
    """

    baseline_p50: float
    model_p50: float
    baseline_p99: float
    model_p99: float
    slowdown: float
    low: float
    high: float
    confidence: float
    limit: float
    rounds: int
    calls: int
    interleaved: bool

    @property
    def holds(self) -> bool:
        """Whether the limit holds; it is exceeded only if the whole interval is above it."""
        return self.low <= self.limit

    @property
    def text(self) -> str:
        """The result in words: whether the limit holds, and whether that is certain."""
        if not self.holds:
            return "FAILED"
        return "passed" if self.high <= self.limit else "passed, but a larger slowdown cannot be excluded"


class ScenarioResult(_Record):
    """One scenario of MLCommons LoadGen.

    Attributes:
        scenario: its name.
        queries: number of queries that were answered.
        rate: requested queries per second (Server).
        percentile: the reported percentile of the latencies, as a share: 0.99.
        observed: that percentile of the queries, in milliseconds.
        milliseconds: upper bound of that percentile with LoadGen's confidence, where it computes one (SingleStream).
        bound: maximum of the percentile in milliseconds, or None.
        samples_per_second: throughput (Offline).
        holds: whether the bound holds and is proven; True where there is no bound.
        why: why the bound does not hold or is not proven; empty where it holds.
    """

    scenario: str
    queries: int
    rate: float | None = None
    percentile: float | None = None
    observed: float | None = None
    milliseconds: float | None = None
    bound: float | None = None
    samples_per_second: float | None = None
    holds: bool = True
    why: str = ""

    @property
    def unproven(self) -> bool:
        """Whether the queries were within the bound, but too few to prove it."""
        within = self.observed is not None and self.bound is not None and self.observed <= self.bound
        return within and not self.holds


class Verdict(_Record):
    """The result of one check.

    Attributes:
        time: end of the check, ISO 8601 in UTC.
        model, baseline: the compared models.
        host: where the model runs.
        inputs: the origin of the inputs.
        batch, seq: rows per call and tokens per row, or of a prompt.
        new_tokens: tokens that follow a prompt; None where the model is called once.
        outputs: agreement of the outputs.
        proofs: proofs of an engine in int8 or bfloat16 that were run again, and hold, because the engine was proven on
            another machine.
        slowdown: the comparison of times: of calls, or per further token; None where nothing was timed.
        first_token: the comparison of times to the first token of a model that generates; None for other models.
        scenarios: results of LoadGen's scenarios.
        phase: the last phase of the check; `DONE` where it was not interrupted.
        interrupted: message of the error that interrupted `phase`, or empty.
        machine: description of this machine.
        seconds: duration of the check.
    """

    time: str
    model: str
    baseline: str
    host: str
    inputs: str
    batch: int
    seq: int
    new_tokens: int | None = None
    outputs: OutputAgreement
    proofs: tuple[Proof, ...] = ()
    slowdown: Slowdown | None
    first_token: Slowdown | None = None
    scenarios: tuple[ScenarioResult, ...] = ()
    phase: CheckPhase = CheckPhase.DONE
    interrupted: str = ""
    machine: dict[str, str]
    seconds: float

    @property
    def title(self) -> str:
        """The compared models, in words."""
        return f"{self.model} against {self.baseline}"

    @property
    def comparison(self) -> tuple[object, ...]:
        """The values that must be equal for times to be comparable: models, sizes, host and machine."""
        machine = (self.machine.get(part) for part in COMPARABLE_FIELDS)
        return self.model, self.baseline, self.batch, self.seq, self.new_tokens, self.host, *machine

    @property
    def cases(self) -> dict[str, str]:
        """Each comparison of times and each scenario: its name -> why its bound does not hold; empty where it does."""
        slowdowns = {FIRST_TOKEN: self.first_token, SLOWDOWN: self.slowdown}
        timed = {name: self._failure(name, slow) for name, slow in slowdowns.items() if slow is not None}
        return timed | {result.scenario: "" if result.holds else result.why for result in self.scenarios}

    def _failure(self, name: str, slow: Slowdown) -> str:
        """Why a limit of a slowdown does not hold, or empty."""
        if slow.holds:
            return ""
        of = "" if self.first_token is None else " to the first token" if name == FIRST_TOKEN else " per token"
        return (
            f"{self.model} is {slow.slowdown:.1%} slower{of} than {self.baseline} (95% interval {slow.low:.1%} to"
            f" {slow.high:.1%}), the limit is {slow.limit:.1%}"
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """The bounds that do not hold, one line each."""
        timed = (FIRST_TOKEN, SLOWDOWN)
        return tuple(why if name in timed else f"{name}: {why}" for name, why in self.cases.items() if why)

    @property
    def outcome(self) -> Outcome:
        """Whether the check passed, failed or was interrupted."""
        if self.phase is not CheckPhase.DONE:
            return Outcome.INTERRUPTED
        return Outcome.FAILED if self.failures else Outcome.PASSED

    @property
    def passed(self) -> bool:
        """Whether every bound holds and the check was not interrupted."""
        return self.outcome is Outcome.PASSED

    def lines(self) -> list[str]:
        """The verdict as lines of text."""
        return [
            *([f"proofs     {len(self.proofs)} proofs of 8-bit matmuls hold on this machine"] if self.proofs else []),
            self._outputs_line(),
            *self._slowdown_lines("" if self.first_token is None else "first token", self.first_token),
            *self._slowdown_lines("" if self.first_token is None else "each further token", self.slowdown),
            *map(_scenario_line, self.scenarios),
            *([f"interrupted  {self.interrupted}"] if self.interrupted else []),
        ]

    def _outputs_line(self) -> str:
        if self.outputs.error is None:
            streams = self.first_token is not None
            text = "text from every prompt, not compared" if streams else "finite, of the expected shapes and types"
        else:
            text = f"equal to {self.outputs.expected} within {self.outputs.error:.1e}"
        return f"outputs    {text} ({self.outputs.batches} batches); inputs: {self.inputs}"

    def _slowdown_lines(self, heading: str, slow: Slowdown | None) -> list[str]:
        if slow is None:
            return []
        rounds = f"{slow.rounds} {'pairs of rounds' if slow.interleaved else 'rounds'} of {slow.calls} calls"
        result = Outcome.INTERRUPTED.value if self.outcome is Outcome.INTERRUPTED else slow.text
        return [
            *([heading] if heading else []),
            f"p50        {slow.model_p50:.3f} ms, baseline {slow.baseline_p50:.3f} ms ({rounds})",
            f"p99        {slow.model_p99:.3f} ms, baseline {slow.baseline_p99:.3f} ms (not compared: too noisy)",
            f"speed      {1 / (1 + slow.slowdown):.2f}× as fast as the baseline; time {slow.slowdown:+.1%}"
            f" (95%: {slow.low:+.1%} to {slow.high:+.1%}), limit {slow.limit:+.1%}: {result}".replace("-", "−"),
        ]


def _scenario_line(result: ScenarioResult) -> str:
    if result.samples_per_second is not None:
        measured = f"{result.samples_per_second:.1f} samples/s"
    elif result.observed is not None:
        measured = f"p{100 * (result.percentile or 0):g} {result.observed:.3f} ms"
        measured += f" at {result.rate:.1f} queries/s" if result.rate is not None else ""
    else:
        measured = "not measured"
    bound = "" if result.bound is None else f", bound {result.bound:g} ms"
    status = "passed" if result.holds else f"FAILED, {result.why}"
    return f"{result.scenario:12} {measured}{bound} ({result.queries} queries): {status}"
