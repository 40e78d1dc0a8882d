"""Allocation: the widths of an exhaustive search, within every budget."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest

from compressor.errors import BudgetError, ErrorCode
from compressor.selection.allocation import Curve, allocate, interpolate, monotone
from tests.faults import fails_with

Instance = tuple[list[dict[int, float]], list[list[dict[int, float]]], list[float]]


def draw(seed: int) -> Instance:
    """Losses, costs and budgets near those of some widths; costs of odd seeds are whole numbers, with many ties."""
    random = np.random.default_rng(seed)
    widths = [sorted(random.choice(20, random.integers(1, 6), replace=False).tolist()) for _ in range(seed % 4 + 1)]
    losses = [dict(zip(counts, random.random(len(counts)).tolist(), strict=True)) for counts in widths]
    costs = [
        [{k: float(random.integers(0, 10) if seed % 2 else random.random() * 1e6) for k in counts} for counts in widths]
        for _ in range(random.integers(0, 3))
    ]
    chosen = [int(random.choice(counts)) for counts in widths]
    slack = (0.0, -1e-8, -1e-7, -0.1, 0.1)[seed % 5]
    return losses, costs, [total(row, chosen) * (1 + slack) for row in costs]


def total(curves: list[dict[int, float]], widths: tuple[int, ...] | list[int]) -> float:
    return math.fsum(curve[width] for curve, width in zip(curves, widths, strict=True))


def is_within(costs: list[list[dict[int, float]]], budgets: list[float], widths: tuple[int, ...] | list[int]) -> bool:
    return all(total(row, widths) <= budget * (1 + 1e-9) for row, budget in zip(costs, budgets, strict=True))


@pytest.mark.parametrize("seed", range(120))
def test_the_allocation_is_that_of_an_exhaustive_search(seed: int) -> None:
    losses, costs, budgets = draw(seed)
    curves = [monotone(curve) for curve in losses]
    within = [widths for widths in itertools.product(*losses) if is_within(costs, budgets, widths)]
    if not within:
        with pytest.raises(BudgetError):
            allocate(losses, costs, budgets)
        return
    widths = allocate(losses, costs, budgets)
    assert is_within(costs, budgets, widths)
    assert total(curves, widths) == pytest.approx(min(total(curves, candidate) for candidate in within), rel=1e-9)


def test_many_groups_fill_the_budget() -> None:
    random = np.random.default_rng(0)
    counts = range(0, 1537, 64)
    losses = [{k: math.exp(-k / 200) * random.uniform(0.5, 2) for k in counts} for _ in range(12)]
    costs = [[{k: 0.1 + k / 1536 * random.uniform(0.9, 1.1) for k in counts} for _ in range(12)]]
    used = total(costs[0], allocate(losses, costs, [6.0]))
    assert 5.9 < used <= 6


def test_small_losses_are_distinguished() -> None:
    losses = [{0: 3e-9, 1: 0.0}, {0: 2e-9, 1: 0.0}]
    costs = [[{0: 0.0, 1: 1.0}, {0: 0.0, 1: 1.0}]]
    assert allocate(losses, costs, [1.0]) == [1, 0]


@pytest.mark.parametrize(
    ("losses", "costs", "expected"),
    [
        ({0: 2, 4: 1, 8: 0}, {0: 0, 4: 3, 8: 2}, 8),  # width 4 is slower than 8
        ({0: 2, 4: 1, 8: 1}, {0: 0, 4: 2, 8: 2}, 8),  # alike: the larger width
        ({0: 2, 4: 1, 8: 1}, {0: 0, 4: 1, 8: 2}, 4),  # no loss saved: the cheaper width
        ({0: 2, 4: 1, 8: 0}, {0: 0, 4: 1}, 4),  # the cost of width 8 is unknown
        ({0: 2, 4: 1, 8: 3}, {0: 0, 4: 5, 8: 2}, 8),  # more units never lose more: width 8 loses what 4 does
    ],
)
def test_dominated_and_unknown_widths_are_not_chosen(losses: Curve, costs: Curve, expected: int) -> None:
    assert allocate([losses], [[costs]], [2.0]) == [expected]
    assert allocate([losses], [[costs], [costs]], [2.0, 9.0]) == [expected]


def test_without_budgets_nothing_is_lost() -> None:
    assert allocate([{0: 1.0, 8: 0.0}, {0: 1.0, 4: 0.0}], [], []) == [8, 4]
    assert allocate([], [[]], [1.0]) == []


def test_costs_may_be_zero() -> None:
    assert allocate([{0: 1.0, 8: 0.0}], [[{0: 0.0, 8: 0.0}]], [0.0]) == [8]


def test_an_unreachable_budget_reports_the_least() -> None:
    losses = [{0: 1.0, 4: 0.0}, {0: 1.0, 4: 0.0}]
    costs = [[{0: 1.0, 4: 3.0}, {0: 0.5, 4: 3.0}], [{0: 2.0, 4: 3.0}, {0: 2.0, 4: 3.0}]]
    details = {"least": (1.5, 4.0), "budgets": (1.0, 9.0), "exceeded": (0,)}
    with fails_with(ErrorCode.BUDGET_UNREACHABLE, BudgetError, **details) as caught:
        allocate(losses, costs, [1.0, 9.0])
    assert caught.value.exit_code == 2
    assert str(caught.value) == "no plan meets the budgets: 1.5 is the least for a budget of 1; raise the budget"
    assert pickle.loads(pickle.dumps(caught.value)).details == details


def test_budgets_that_exclude_each_other_are_unreachable() -> None:
    costs = [[{0: 1.0, 4: 3.0}], [{0: 3.0, 4: 1.0}]]
    with fails_with(ErrorCode.BUDGET_UNREACHABLE, BudgetError, least=(1.0, 1.0), exceeded=()):
        allocate([{0: 1.0, 4: 0.0}], costs, [2.0, 2.0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with fails_with(ErrorCode.NOT_FINITE):
        allocate([{0: value}], [[{0: 1.0}]], [2.0])
    with fails_with(ErrorCode.NOT_FINITE):
        allocate([{0: 1.0}], [[{0: 1.0}]], [value])


def test_curves_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="each budget"):
        allocate([{0: 1.0}], [[{0: 1.0}]], [])
    with pytest.raises(ValueError, match="no width"):
        allocate([{0: 1.0}], [[{4: 1.0}]], [1.0])


def test_more_units_never_lose_more() -> None:
    assert monotone({8: 0.3, 0: 1.0, 4: 0.2, 12: 0.0}) == {0: 1.0, 4: 0.2, 8: 0.2, 12: 0.0}
    assert monotone(monotone({0: 1.0, 4: 2.0})) == {0: 1.0, 4: 1.0}
    assert monotone({}) == {}


def test_interpolation_is_linear_in_the_logarithm_of_positive_values() -> None:
    curve = {0: 4.0, 16: 1.0, 32: 0.0}
    assert interpolate(curve, [0, 4, 8, 16, 24, 32]) == pytest.approx(
        {0: 4, 4: 4**0.75, 8: 2, 16: 1, 24: 0.5, 32: 0}, abs=1e-12
    )


@pytest.mark.parametrize("width", [-1, 40])
def test_interpolation_does_not_extrapolate(width: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        interpolate({0: 1.0, 32: 0.0}, [width])
