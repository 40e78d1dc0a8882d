"""Paired bootstrap intervals: their width, and the pairing of examples."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.measure import paired_interval


def mean(statistics: np.ndarray) -> float:
    return float(statistics[:, 0].mean())


def test_the_interval_is_narrow_if_the_models_agree() -> None:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(400, 1))
    compressed = dense - 0.1
    assert paired_interval(dense, compressed, mean, seed=0) == pytest.approx((-0.1, -0.1, -0.1))
    shuffled = paired_interval(dense, rng.permutation(compressed), mean, seed=0)
    assert shuffled.difference == pytest.approx(-0.1)
    assert shuffled.low < -0.15 < -0.05 < shuffled.high


def test_the_interval_has_the_width_of_its_formula() -> None:
    """The standard error of a paired mean, for differences of known spread."""
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(1000, 1))
    compressed = dense + rng.normal(0.05, 1.0, size=(1000, 1))
    interval = paired_interval(dense, compressed, mean, seed=3)
    error = float((compressed - dense).std() / np.sqrt(1000))
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert interval.low < interval.difference < interval.high
    assert paired_interval(dense, compressed, mean, seed=3) == interval
    assert paired_interval(dense, compressed, mean, seed=4) != interval


def test_draws_that_leave_the_metric_undefined_are_ignored() -> None:
    statistics = np.array([[1.0], [0.0], [0.0]])

    def metric(rows: np.ndarray) -> float:
        return mean(rows) if rows.any() else float("nan")

    assert paired_interval(statistics, statistics, metric, seed=0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("dense", "compressed"), [(3, 4), (0, 0)])
def test_different_numbers_of_examples_are_not_paired(dense: int, compressed: int) -> None:
    with pytest.raises(ValueError, match="both models must have scored the same"):
        paired_interval(np.zeros((dense, 2)), np.zeros((compressed, 2)), mean, seed=0)
