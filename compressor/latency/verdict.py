"""What a check found, as data: its text, JSON, JUnit report and history are read off it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from compressor.environment import SAME

# A history may have lines of versions that know more.
_KEPT = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class Answers(BaseModel):
    """How far the model's answers are from what was expected, over every batch."""

    model_config = _KEPT

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

    model_config = _KEPT

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

    @property
    def told(self) -> str:
        """Whether it holds, and how surely."""
        if not self.holds:
            return "FAILED"
        return "passed" if self.high <= self.limit else "passed, though more than the limit cannot be excluded"


class Load(BaseModel):
    """One scenario of MLCommons LoadGen.

    Attributes:
        rate: queries a second that were asked for (Server).
        observed: the percentile of the queries, in milliseconds.
        milliseconds: what the percentile is at most, with LoadGen's own confidence, where it says (SingleStream).
        why: where it does not hold or is no measurement.
    """

    model_config = _KEPT

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
        """Whether the queries kept the bound, and were too few to prove it."""
        kept = self.observed is not None and self.bound is not None and self.observed <= self.bound
        return kept and not self.holds


class Verdict(BaseModel):
    """One check.

    Attributes:
        interrupted: what broke off the timing; what had been measured until then is here.
    """

    model_config = _KEPT

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
    def title(self) -> str:
        """What is compared, in words."""
        return f"{self.model} against {self.baseline}"

    @property
    def subject(self) -> tuple[object, ...]:
        """What has to be alike for two checks to be of the same."""
        where = (self.host, *(self.machine.get(part) for part in SAME))
        return self.model, self.baseline, self.batch, self.seq, *where

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
                f" {found.limit:.1%}: {'broken off' if self.interrupted else found.told}",
            ]
        for load in self.loads:
            rate = "" if load.samples_per_second is None else f"{load.samples_per_second:.1f} samples/s"
            late = "" if load.observed is None else f"p{100 * (load.percentile or 0):g} {load.observed:.3f} ms"
            late += f" at {load.rate:.1f} queries/s" if load.rate is not None else ""
            bound = "" if load.bound is None else f", bound {load.bound:g} ms"
            told.append(
                f"{load.scenario:10} {rate or late}{bound} ({load.queries} queries): "
                + ("passed" if load.holds else f"FAILED, {load.why}")
            )
        if self.interrupted:
            told.append(f"broken off  {self.interrupted}")
        return told
