"""Verdicts: outcome, text, and records that later versions wrote."""

from __future__ import annotations

import pytest

from compressor.latency.verdict import CheckPhase, Outcome, Slowdown, Verdict
from tests.latency.verdicts import scenario, slowdown, verdict


def test_a_record_of_a_later_version_is_read() -> None:
    assert Verdict.model_validate({**verdict().model_dump(), "temperature": 70}) == verdict()


@pytest.mark.parametrize("record", [verdict(), verdict(slowdown=None), verdict(phase=CheckPhase.SCENARIOS)])
def test_a_record_is_read_without_a_change(record: Verdict) -> None:
    assert Verdict.model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize(
    ("low", "high", "holds"), [(-0.1, 0.0, True), (0.0, 0.1, True), (0.05, 0.1, True), (0.06, 0.1, False)]
)
def test_a_limit_is_missed_only_beyond_noise(low: float, high: float, holds: bool) -> None:
    result = slowdown(low=low, high=high, slowdown=(low + high) / 2, limit=0.05)
    assert result.holds is holds
    assert verdict(slowdown=result).outcome is (Outcome.PASSED if holds else Outcome.FAILED)


def test_an_interrupted_check_never_passes_or_fails() -> None:
    slow = slowdown(low=0.5, high=0.6, slowdown=0.55)
    for measured in (None, slow, slowdown()):
        record = verdict(slowdown=measured, phase=CheckPhase.TIMING, interrupted="gone")
        assert record.outcome is Outcome.INTERRUPTED
        assert not record.passed
        assert "passed" not in "".join(record.lines())
        assert "gone" in record.lines()[-1]


def test_every_missed_bound_is_a_failure() -> None:
    missed = scenario(holds=False, why="p99 12.000 ms is beyond the bound of 10 ms", observed=12.0)
    record = verdict(slowdown=slowdown(low=0.1, high=0.3, slowdown=0.2), scenarios=(scenario(), missed))
    assert len(record.failures) == 2
    assert record.outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("observed", "bound", "holds", "unproven"),
    [(9.0, 10.0, True, False), (9.0, 10.0, False, True), (11.0, 10.0, False, False), (9.0, None, True, False)],
)
def test_a_bound_is_unproven_if_the_queries_kept_it(
    observed: float, bound: float | None, holds: bool, unproven: bool
) -> None:
    assert scenario(observed=observed, bound=bound, holds=holds).unproven is unproven


def test_lines_of_a_verdict() -> None:
    missed = scenario(holds=False, why="too slow", observed=12.0)
    assert verdict(scenarios=(missed,)).lines() == [
        "outputs    equal to the baseline within 1.0e-06 (16 batches); inputs: random",
        "p50        1.000 ms, baseline 1.000 ms (10 pairs of rounds of 20 calls)",
        "p99        1.000 ms, baseline 1.000 ms (not compared: too noisy)",
        "speed      1.00× as fast as the baseline; time +0.0% (95%: −1.0% to +1.0%), limit +5.0%: passed",
        "SingleStream p99 12.000 ms, bound 10 ms (662 queries): FAILED, too slow",
    ]


@pytest.mark.parametrize(("change", "speed"), [(-0.562, "2.28×"), (0.25, "0.80×")])
def test_lines_say_how_much_faster_or_slower_the_model_is(change: float, speed: str) -> None:
    record = verdict(slowdown=slowdown(slowdown=change, low=change - 0.01, high=change + 0.01))
    (line,) = (line for line in record.lines() if line.startswith("speed "))
    assert f"{speed} as fast as the baseline; time {change:+.1%}".replace("-", "−") in line
    assert "slowdown" not in line


def test_checks_are_compared_only_on_one_machine() -> None:
    this_machine, other_machine = verdict(), verdict(machine={"processor": "another"})
    assert this_machine.comparison == verdict(time="later").comparison
    assert this_machine.comparison != other_machine.comparison
    assert isinstance(this_machine.slowdown, Slowdown)
