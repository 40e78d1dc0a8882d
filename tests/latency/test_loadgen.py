"""Scenarios of LoadGen: what they measure, and that they end even if calls are slow or fail."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from compressor.config.check import Scenario
from compressor.latency.loadgen import MIN_QUERIES, MORE_QUERIES, ScenarioSettings, run_scenario, run_until_proven

pytest.importorskip("mlperf_loadgen")

SETTINGS = ScenarioSettings(batch=4, p50=0.2, bound=10_000.0, rate=5000.0, seconds=0.1, concurrency=4)


def call() -> None:
    time.sleep(1e-4)


@pytest.mark.parametrize("scenario", ["SingleStream", "Server"])
def test_the_tail_is_bounded(scenario: Scenario) -> None:
    result = run_scenario(scenario, [call], SETTINGS)
    assert result.holds
    assert result.queries >= MIN_QUERIES
    assert result.milliseconds is not None
    assert result.milliseconds >= 0.1
    assert (result.rate is not None) is (scenario == "Server")
    tight = run_scenario(scenario, [call], replace(SETTINGS, bound=1e-3))
    assert not tight.holds
    assert tight.observed is not None
    assert tight.observed > 1e-3
    assert not tight.unproven


def test_without_a_bound_the_tail_is_measured() -> None:
    result = run_scenario("SingleStream", [call], replace(SETTINGS, bound=None))
    assert result.holds
    assert result.observed is not None
    assert result.observed >= 0.1


def test_throughput_is_measured() -> None:
    result = run_scenario("Offline", [call], replace(SETTINGS, bound=None))
    assert result.samples_per_second is not None
    assert 0 < result.samples_per_second < 4 * 4 / 1e-4, "four threads, each with four rows per call"


def test_a_scenario_ends_although_requests_arrive_faster_than_responses() -> None:
    overloaded = replace(SETTINGS, p50=0.01, bound=1.0, seconds=0.02, rate=20_000.0)
    result = run_scenario("Server", [lambda: time.sleep(0.05)], overloaded)
    assert not result.holds
    assert result.bound == 1.0
    assert result.queries == 0 or (result.observed is not None and result.observed > 1.0)


@pytest.mark.parametrize("scenario", ["SingleStream", "Offline"])
def test_the_error_of_a_call_is_reported_at_once_and_raised_at_the_end(scenario: Any) -> None:
    reported: list[BaseException] = []

    def fail() -> None:
        raise RuntimeError("no call")

    with pytest.raises(RuntimeError, match="no call"):
        run_scenario(scenario, [fail], SETTINGS, reported.append)
    assert [str(error) for error in reported] == ["no call"]


def test_a_bound_that_few_queries_do_not_prove_is_repeated_with_more() -> None:
    calls = itertools.count()

    def rarely_slow() -> None:
        time.sleep(0.1 if next(calls) % 500 == 499 else 1e-5)

    settings = replace(SETTINGS, bound=50.0, p50=0.1, seconds=0.01)
    first = run_scenario("SingleStream", [rarely_slow], settings)
    assert first.unproven
    assert first.queries < MORE_QUERIES
    repeated = run_until_proven("SingleStream", [rarely_slow], settings)
    assert repeated.holds, repeated.why
    assert repeated.queries >= MORE_QUERIES


def test_a_bound_that_is_proven_or_missed_is_not_repeated() -> None:
    for bound, holds in ((10_000.0, True), (1e-3, False)):
        calls = itertools.count()
        result = run_until_proven("SingleStream", [partial(next, calls)], replace(SETTINGS, bound=bound))
        assert result.holds is holds
        assert next(calls) == result.queries
