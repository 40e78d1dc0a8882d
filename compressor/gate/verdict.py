"""What a check found, as data: its text, JSON, JUnit report and history are read off it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

_STRICT = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Answers(BaseModel):
    """How far the model's answers are from what was expected, over every batch."""

    model_config = _STRICT

    expected: str
    """Of whom, in words."""
    error: float | None
    """Largest relative error; None where the model has to answer sensibly, not alike."""
    tolerance: float
    batches: int


class Slowdown(BaseModel):
    """Median time of the model over that of the baseline, less one; the interval is a paired bootstrap over blocks.

    Times are milliseconds a call.
    """

    model_config = _STRICT

    baseline_p50: float
    model_p50: float
    baseline_p99: float
    model_p99: float
    slowdown: float
    low: float
    high: float
    confidence: float
    limit: float
    blocks: int
    calls: int
    interleaved: bool
    """False where the baseline's times were measured before."""

    @property
    def holds(self) -> bool:
        """A slowdown fails only when even its lower bound is beyond the limit."""
        return self.low <= self.limit


class Load(BaseModel):
    """One scenario of MLCommons LoadGen; `milliseconds` is a percentile with LoadGen's own confidence."""

    model_config = _STRICT

    scenario: str
    queries: int
    percentile: float | None = None
    milliseconds: float | None = None
    bound: float | None = None
    samples_per_second: float | None = None
    holds: bool = True
    why: str = ""
    """Where it does not hold or is no measurement: LoadGen's reason."""


class Verdict(BaseModel):
    """One check.

    Attributes:
        interrupted: what broke off the timing; what had been measured until then is here.
    """

    model_config = _STRICT

    time: str
    model: str
    baseline: str
    host: str
    inputs: str
    batch: int
    seq: int
    answers: Answers
    slowdown: Slowdown | None
    loads: tuple[Load, ...] = ()
    interrupted: str = ""
    machine: dict[str, str]
    seconds: float

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not hold, one line each."""
        found = []
        if self.slowdown is not None and not self.slowdown.holds:
            found.append(
                f"{self.model} is {self.slowdown.slowdown:.1%} slower than {self.baseline} (95% interval"
                f" {self.slowdown.low:.1%} to {self.slowdown.high:.1%}), the limit is {self.slowdown.limit:.1%}"
            )
        for load in self.loads:
            if not load.holds:
                found.append(f"{load.scenario}: {load.why}")
        return tuple(found)

    @property
    def passed(self) -> bool:
        return not self.failures and not self.interrupted

    def lines(self) -> list[str]:
        """The check in words."""
        if self.answers.error is None:
            answers = f"finite, of the expected shapes and types ({self.answers.batches} batches)"
        else:
            answers = f"equal {self.answers.expected} within {self.answers.error:.1e} ({self.answers.batches} batches)"
        told = [f"answers    {answers}; inputs: {self.inputs}"]
        if self.slowdown is not None:
            found = self.slowdown
            way = f"{found.blocks} {'pairs of blocks' if found.interleaved else 'blocks'} of {found.calls} calls"
            told += [
                f"p50        {found.model_p50:.3f} ms, baseline {found.baseline_p50:.3f} ms ({way})",
                f"p99        {found.model_p99:.3f} ms, baseline {found.baseline_p99:.3f} ms (not gated on: too noisy)",
                f"slowdown   {found.slowdown:+.1%} (95%: {found.low:+.1%} to {found.high:+.1%}), limit"
                f" {found.limit:.1%}: " + ("passed" if found.holds else "FAILED"),
            ]
        for load in self.loads:
            rate = "" if load.samples_per_second is None else f"{load.samples_per_second:.1f} samples/s"
            late = "" if load.milliseconds is None else f"p{100 * (load.percentile or 0):g} {load.milliseconds:.3f} ms"
            bound = "" if load.bound is None else f", bound {load.bound:g} ms"
            told.append(
                f"{load.scenario:10} {rate or late}{bound} ({load.queries} queries): "
                + ("passed" if load.holds else f"FAILED, {load.why}")
            )
        if self.interrupted:
            told.append(f"broken off  {self.interrupted}")
        return told
