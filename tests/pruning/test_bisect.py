"""The bisection over speeds: where it goes on, and what each plan is expected to lose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.pruning.bisect import (
    ResampledScore,
    estimate_losses,
    next_speed,
    rows_that_show,
    unseen_share,
    upper_losses,
)

BOUNDS = (1.0, 12.5)
DRAWS = 200
NAN = float("nan")


@given(st.floats(*BOUNDS), st.sampled_from([1.05, 1.4, 2.0, math.inf]))
def test_the_bisection_closes_in_on_the_fastest_plan_that_holds(fastest: float, ratio: float) -> None:
    """Plans that are faster than one of them lose too much."""
    holding: list[float] = []
    failed: list[float] = []
    while speed := next_speed(holding, failed, BOUNDS, 1.01, ratio):
        assert BOUNDS[0] <= speed <= BOUNDS[1]
        assert speed <= ratio * max(holding, default=BOUNDS[0])
        assert all(speed > slower for slower in holding)
        assert all(speed < faster for faster in failed)
        (holding if speed <= fastest else failed).append(speed)
        assert len(holding) + len(failed) < 100
    assert min(failed, default=BOUNDS[1]) <= 1.01 * max(holding, default=BOUNDS[0])


def test_a_failure_below_a_plan_that_holds_bounds_nothing() -> None:
    assert next_speed([2.0], [1.4], BOUNDS, 1.01) == pytest.approx(math.sqrt(2 * BOUNDS[1]))


def scores(losses: Sequence[float], divergences: Sequence[float], noise: float, seed: int = 0) -> list[ResampledScore]:
    """The whole model with metric 0.9, and plans whose losses are disturbed in the same way as those of their draws."""
    rng = np.random.default_rng(seed)
    plans = []
    for loss, divergence in zip(losses, divergences, strict=True):
        metric, *draws = 0.9 - loss + noise * rng.standard_normal(1 + DRAWS)
        plans.append(ResampledScore(metric, np.array(draws), divergence))
    return [ResampledScore(0.9, np.full(DRAWS, 0.9), 0.0), *plans]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_losses_in_proportion_to_divergences_are_those_of_the_plans(higher_is_better: bool) -> None:
    divergences = [0.01, 0.02, 0.05]
    sign = 1 if higher_is_better else -1
    whole, *plans = scores([sign * 0.2 * divergence for divergence in divergences], divergences, noise=0.0)
    estimates = estimate_losses(whole, plans, higher_is_better=higher_is_better)
    assert [estimate.loss for estimate in estimates] == pytest.approx([0.002, 0.004, 0.01])
    assert [estimate.error for estimate in estimates] == pytest.approx([0, 0, 0])


def test_a_small_loss_is_known_better_where_larger_ones_are() -> None:
    """Beside the truth, the error and the error that is reported are those of the larger losses in proportion."""
    divergences = [0.02, 0.05, 0.1]
    alone, together = [], []
    for seed in range(50):
        whole, *plans = scores([0.2 * divergence for divergence in divergences], divergences, 0.006, seed)
        alone += estimate_losses(whole, plans[:1], higher_is_better=True)
        together += estimate_losses(whole, plans, higher_is_better=True)[:1]
    for estimates, error in ((alone, 0.006), (together, 0.02 / 0.17 * np.sqrt(3) * 0.006)):
        assert np.std([estimate.loss for estimate in estimates]) == pytest.approx(error, rel=0.3)
        assert [estimate.error for estimate in estimates] == pytest.approx(np.full(50, error), rel=0.3)


def test_a_plan_loses_more_than_its_upper_loss_about_once_in_twenty_times() -> None:
    """The true losses are in proportion to the divergences; the scores and their draws have noise of the same size."""
    divergences = [0.02, 0.05, 0.08]
    exceeded = 0
    for seed in range(400):
        whole, *plans = scores([0.2 * divergence for divergence in divergences], divergences, 0.006, seed)
        exceeded += 0.2 * divergences[0] > upper_losses(whole, plans, higher_is_better=True)[0]
    assert 0.02 < exceeded / 400 < 0.09


def with_loss(loss: float, noise: float, ceiling: float | None = None) -> tuple[ResampledScore, ResampledScore]:
    """The whole model, and a plan that has some loss on the evaluation rows."""
    draws = 0.9 - loss + noise * np.random.default_rng(0).standard_normal(DRAWS)
    whole = ResampledScore(0.9, np.full(DRAWS, 0.9), 0.0)
    return whole, ResampledScore(0.9 - loss, draws, 0.05, ceiling)


@given(st.floats(-0.1, 0.1), st.floats(1e-4, 0.05), st.floats(0, 0.2))
def test_an_upper_loss_lies_between_none_and_the_ceiling(loss: float, noise: float, ceiling: float) -> None:
    """Unless the plan itself certainly loses more; a ceiling only lowers the bound."""
    whole, plan = with_loss(loss, noise, ceiling)
    (bound,) = upper_losses(whole, [plan], higher_is_better=True)
    (free,) = upper_losses(whole, [with_loss(loss, noise)[1]], higher_is_better=True)
    certain = loss - 1.7 * noise
    assert 0 <= bound <= max(ceiling, certain) + 1e-6
    assert bound <= free + 1e-6


@pytest.mark.parametrize("gain", [0.0, 0.005, 0.02])
def test_a_gain_on_few_rows_says_less_than_a_margin_around_it(gain: float) -> None:
    """A plan does not gain, so that the rows happen to agree with its errors, and the error of the estimate remains."""
    whole, plan = with_loss(-gain, 0.008)
    (estimate,) = estimate_losses(whole, [plan], higher_is_better=True)
    (bound,) = upper_losses(whole, [plan], higher_is_better=True)
    assert max(0.0, estimate.loss + 1.645 * estimate.error) < bound < 2.1 * estimate.error


@pytest.mark.parametrize(("ceiling", "expected"), [(None, math.inf), (0.01, 0.01)])
def test_a_plan_of_which_no_draw_is_defined_is_bounded_by_its_ceiling_alone(
    ceiling: float | None, expected: float
) -> None:
    whole, plan = with_loss(-0.01, 0.004, ceiling)
    plan.draws[:] = NAN
    assert upper_losses(whole, [plan], higher_is_better=True) == [expected]


@pytest.mark.parametrize("ceiling", [None, 0.001])
def test_a_plan_without_finite_answers_has_no_bound(ceiling: float | None) -> None:
    whole, _ = with_loss(0.0, 0.004)
    failed = ResampledScore(0.5, np.full(DRAWS, 0.5), NAN, ceiling)
    assert upper_losses(whole, [failed], higher_is_better=True) == [math.inf]


def test_a_clear_loss_keeps_its_margin() -> None:
    whole, plan = with_loss(0.05, 0.004)
    (bound,) = upper_losses(whole, [plan], higher_is_better=True)
    assert bound == pytest.approx(0.05 + 1.645 * 0.004, rel=0.05)


@pytest.mark.parametrize(("metric", "divergence"), [(0.5, NAN), (0.5, float("inf")), (NAN, 0.03)])
def test_a_plan_without_finite_answers_loses_everything_and_says_nothing_about_others(
    metric: float, divergence: float
) -> None:
    whole, *plans = scores([0.002, 0.004], [0.01, 0.02], noise=0.0)
    failed = ResampledScore(metric, np.full(DRAWS, metric), divergence)
    with_failed = estimate_losses(whole, [*plans, failed], higher_is_better=True)
    assert with_failed[:2] == estimate_losses(whole, plans, higher_is_better=True)
    assert with_failed[2].loss == np.inf


def test_a_model_that_answers_by_chance_says_nothing_about_small_changes() -> None:
    whole, *plans = scores([0.002, 0.004, 0.4], [0.01, 0.02, 40.0], noise=0.0)
    estimates = estimate_losses(whole, plans, higher_is_better=True)
    assert [estimate.loss for estimate in estimates[:2]] == pytest.approx([0.002, 0.004])


def test_a_plan_is_not_accepted_against_what_it_certainly_loses_itself() -> None:
    whole, *plans = scores([0.03, 0.04, 0.05], [0.1, 0.4, 0.45], noise=0.001)
    (expected, *_), (upper, *_) = (
        estimate_losses(whole, plans, higher_is_better=True),
        upper_losses(whole, plans, higher_is_better=True),
    )
    assert expected.loss < 0.015
    assert upper == pytest.approx(0.028, abs=0.003)


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_plans_without_divergence_lose_what_they_show(loss: float) -> None:
    whole, *plans = scores([loss, loss], [0.0, 0.0], noise=0.0)
    estimates = estimate_losses(whole, plans, higher_is_better=True)
    assert [estimate.loss for estimate in estimates] == pytest.approx([loss, loss])


def test_undefined_draws_are_ignored() -> None:
    whole, *plans = scores([0.002, 0.004], [0.01, 0.02], noise=0.001)
    plans[0].draws[3] = NAN
    assert np.isfinite(estimate_losses(whole, plans, higher_is_better=True)).all()


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 0.001])
def test_one_of_the_rows_that_show_a_share_of_changes_changes(share: float) -> None:
    rows = rows_that_show(share)
    assert unseen_share(rows) <= share < unseen_share(rows - 1)
    assert (1 - share) ** rows <= 0.05 < (1 - share) ** (rows - 1)
