"""The loss that is expected of a plan follows its divergence, and is known better than by the plan alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from compressor.run.pruning.metric_trials import ResampledScore, estimate_losses

DRAWS = 200


def scores(losses: Sequence[float], divergences: Sequence[float], noise: float, seed: int = 0) -> list[ResampledScore]:
    """The whole model with metric 0.9, and plans whose losses are disturbed in the same way as those of their draws."""
    rng = np.random.default_rng(seed)
    whole = ResampledScore(np.full(1 + DRAWS, 0.9), 0.0)
    plans = [
        ResampledScore(0.9 - loss + noise * rng.standard_normal(1 + DRAWS), divergence)
        for loss, divergence in zip(losses, divergences, strict=True)
    ]
    return [whole, *plans]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_losses_in_proportion_to_divergences_are_those_of_the_plans(higher_is_better: bool) -> None:
    divergences = [0.01, 0.02, 0.05]
    sign = 1 if higher_is_better else -1
    whole, *plans = scores([sign * 0.2 * divergence for divergence in divergences], divergences, noise=0.0)
    estimates = estimate_losses(whole, plans, higher_is_better=higher_is_better)
    assert [estimate.loss for estimate in estimates] == pytest.approx([0.002, 0.004, 0.01])
    assert [estimate.error for estimate in estimates] == pytest.approx([0, 0, 0])


def test_a_small_loss_is_known_better_where_larger_ones_are() -> None:
    """Beside the truth, the error and the error that is reported are those of the larger loss in proportion."""
    divergences = [0.02, 0.05, 0.1]
    alone, together = [], []
    for seed in range(50):
        whole, *plans = scores([0.2 * divergence for divergence in divergences], divergences, 0.006, seed)
        alone += estimate_losses(whole, plans[:1], higher_is_better=True)
        together += estimate_losses(whole, plans, higher_is_better=True)[:1]
    for estimates, error in ((alone, 0.006), (together, 0.02 / 0.17 * np.sqrt(3) * 0.006)):
        assert np.std([estimate.loss for estimate in estimates]) == pytest.approx(error, rel=0.3)
        assert [estimate.error for estimate in estimates] == pytest.approx(np.full(50, error), rel=0.3)


def test_a_model_that_answers_by_chance_says_nothing_about_small_changes() -> None:
    whole, *plans = scores([0.002, 0.004, 0.4], [0.01, 0.02, 40.0], noise=0.0)
    estimates = estimate_losses(whole, plans, higher_is_better=True)
    assert [estimate.loss for estimate in estimates[:2]] == pytest.approx([0.002, 0.004])


def test_plans_that_change_nothing_lose_nothing() -> None:
    whole, *plans = scores([0.0, 0.0], [0.0, 0.0], noise=0.0)
    assert estimate_losses(whole, plans, higher_is_better=True) == [(0.0, 0.0)] * 2


def test_undefined_draws_are_ignored() -> None:
    whole, *plans = scores([0.002, 0.004], [0.01, 0.02], noise=0.001)
    plans[0].metric[3] = np.nan
    assert np.isfinite(estimate_losses(whole, plans, higher_is_better=True)).all()
