"""Cost tables: what plans cost, how tables are stored, and how tables of times are fitted to engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.measure.costs import CostTable, GroupCosts, fit_times, with_curve
from compressor.pruning.measure import measured_counts, timed_plans
from compressor.units import PrunableGroup

SAVINGS = st.lists(st.floats(-1, 5, allow_nan=False), min_size=2, max_size=8)


def group(savings: list[float], names: tuple[str, ...] = ("a",)) -> GroupCosts:
    counts = tuple(4 * number for number in range(len(savings) + 1))
    return GroupCosts(groups=names, type="neurons", counts=counts, savings=(*savings, 0.0))


def table(*rows: GroupCosts, whole: float = 100.0) -> CostTable:
    return CostTable(unit="ms", engine="ort fp32", batch=1, seq=128, dense=120.0, whole=whole, rows=rows)


@given(SAVINGS)
def test_fewer_units_never_cost_more(savings: list[float]) -> None:
    row = group(savings)
    values = [row.saving(count) for count in range(row.counts[-1] + 1)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(0.0)


@given(SAVINGS)
def test_a_scaled_row_saves_as_many_times_as_much(savings: list[float]) -> None:
    row = group(savings)
    before = row.saving(0)
    assert row.scaled(2.0).saving(0) == pytest.approx(2 * before)


@given(SAVINGS, SAVINGS)
def test_costs_add_up(first: list[float], second: list[float]) -> None:
    costs = table(group(first, ("a", "b")), group(second, ("c",)))
    counts = {"a": 0, "b": 2, "c": 4}
    expected = costs.whole - sum(costs.saving(name, count) for name, count in counts.items())
    assert costs.cost(counts) == pytest.approx(expected)
    assert costs.cost({}) == costs.whole
    assert costs.cost(dict.fromkeys("abc", 0)) == pytest.approx(costs.least)


@given(SAVINGS, SAVINGS)
def test_groups_of_fixed_counts_cost_what_they_keep(first: list[float], second: list[float]) -> None:
    costs = table(group(first, ("a", "b")), group(second, ("c",)))
    fixed = costs.with_fixed({"a": 2, "c": 0, "outside": 3})
    assert fixed.cost({"b": 4}) == pytest.approx(costs.cost({"a": 2, "b": 4, "c": 0}))
    assert fixed.cost({"a": 0, "c": 0}) == fixed.whole
    assert {name for row in fixed.rows for name in row.groups} == {"a", "b", "c"}


def test_a_cliff_is_a_number_of_units_that_is_slower_than_a_larger_one() -> None:
    assert group([10.0, 4.0, 6.0, 2.0]).cliffs == (4,)
    assert group([10.0, 6.0, 4.0, 2.0]).cliffs == ()


@pytest.mark.parametrize(("error", "cliffs"), [(0.4, (4,)), (0.6, ())])
def test_a_cliff_exceeds_four_standard_errors(error: float, cliffs: tuple[int, ...]) -> None:
    row = group([10.0, 4.0, 6.0, 2.0]).with_savings([10.0, 4.0, 6.0, 2.0, 0.0], [0.0, error, 0.0, 0.0])
    assert row.cliffs == row.scaled(3.0).cliffs == cliffs


def test_a_group_without_a_row_has_no_saving() -> None:
    with pytest.raises(KeyError, match="missing"):
        table().saving("missing", 1)


CLASSES = [
    [PrunableGroup(f"heads.{number}", "heads", 12, 32, 1, "a") for number in range(3)],
    [PrunableGroup(f"neurons.{number}", "neurons", 384, 1, 32, "a") for number in range(3)],
    [PrunableGroup("last", "heads", 12, 32, 1, "a")],
]
SHARES = (0.5, 0.4, 0.02)


def table_of(whole: float) -> CostTable:
    """A table in which every group costs the same, with the numbers of units that are timed."""
    rows = []
    for members, share in zip(CLASSES, SHARES, strict=True):
        counts = (*measured_counts(members[0], share), members[0].units)
        savings = tuple(whole / 8 * (1 - count / counts[-1]) for count in counts)
        names = tuple(group.name for group in members)
        rows.append(GroupCosts(groups=names, type=members[0].type, counts=counts, savings=savings))
    return CostTable(unit="ms", batch=1, seq=128, dense=30.0, whole=whole, rows=tuple(rows))


def random_table(seed: int) -> CostTable:
    """A table with random costs of the intervals."""
    rng = np.random.default_rng(seed)
    rows = [
        row.model_copy(update={"savings": (*np.cumsum(rng.exponential(size=len(row.counts) - 1))[::-1].tolist(), 0.0)})
        for row in table_of(1.0).rows
    ]
    saved = sum(len(row.groups) * row.saving(0) for row in rows)
    return table_of(saved + rng.exponential()).model_copy(update={"rows": tuple(rows)})


@pytest.mark.parametrize("seed", range(5))
def test_times_that_add_up_are_fitted_exactly(seed: int) -> None:
    truth = random_table(seed)
    points = [(plan, truth.cost(plan)) for plan in timed_plans(CLASSES, SHARES)]
    fitted = fit_times(table_of(truth.whole), points, [0, 1, 2])
    rng = np.random.default_rng(seed)
    for _ in range(20):
        counts = {group.name: int(rng.choice(group.counts)) for members in CLASSES for group in members}
        assert fitted.cost(counts) == pytest.approx(truth.cost(counts), rel=1e-6)


@given(st.integers(0, 1000), st.floats(0.0, 0.1))
def test_a_fit_is_as_close_as_what_is_measured(seed: int, noise: float) -> None:
    truth, rng = random_table(seed), np.random.default_rng(seed)
    points = [(plan, truth.cost(plan) * np.exp(rng.uniform(-noise, noise))) for plan in timed_plans(CLASSES, SHARES)]
    fitted = fit_times(table_of(truth.whole), points, [0, 1, 2])
    assert all(row.savings[0] == max(row.savings) and row.savings[-1] == 0.0 for row in fitted.rows)
    errors = [raw_cost(fitted, plan) / time - 1 for plan, time in points]
    assert np.sqrt(np.mean(np.square(errors))) < 1e-6 + 3 * noise


def with_cliff() -> tuple[CostTable, int]:
    """A table, and the number of neurons that is slower than a larger one."""
    truth = table_of(50.0)
    row = truth.rows[1]
    slower = list(row.savings)
    slower[-2] = -0.3 * slower[0]
    return truth.model_copy(update={"rows": (truth.rows[0], row.with_savings(slower), truth.rows[2])}), row.counts[-2]


def test_a_width_that_is_slower_than_a_larger_one_is_a_cliff() -> None:
    truth, cliff = with_cliff()
    points = [(plan, raw_cost(truth, plan)) for plan in timed_plans(CLASSES, SHARES)]
    fitted = fit_times(table_of(50.0), points, [0, 1, 2])
    assert [row.cliffs for row in fitted.rows] == [(), (cliff,), ()]


def fit_to_rounds(truth: CostTable, noise: float, seed: int) -> CostTable:
    """A table that is fitted to the median times of six rounds of each plan."""
    rng, plans = np.random.default_rng(seed), timed_plans(CLASSES, SHARES)
    rounds = [raw_cost(truth, plan) * np.exp(rng.normal(0.0, noise, 6)) for plan in plans]
    points = [(plan, float(np.median(times))) for plan, times in zip(plans, rounds, strict=True)]
    return fit_times(table_of(50.0), points, [0, 1, 2], [float(times.std() / 2) for times in rounds])


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_noise_is_no_cliff(noise: float) -> None:
    rows = [
        row.with_savings([max(saving - row.savings[0] / 2, 0.0) for saving in row.savings])
        for row in table_of(50.0).rows
    ]
    flat = table_of(50.0).model_copy(update={"rows": tuple(rows)})
    marked = sum(any(row.cliffs for row in fit_to_rounds(flat, noise, seed).rows) for seed in range(20))
    assert marked <= 1


@pytest.mark.parametrize("seed", range(20))
def test_a_cliff_is_found_in_noise(seed: int) -> None:
    truth, cliff = with_cliff()
    assert fit_to_rounds(truth, 0.01, seed).rows[1].cliffs == (cliff,)


def test_errors_grow_with_residuals_that_they_do_not_explain() -> None:
    truth, plans = random_table(0), timed_plans(CLASSES, SHARES)
    rng = np.random.default_rng(0)
    points = [(plan, truth.cost(plan) * np.exp(rng.normal(0.0, 0.1))) for plan in plans]
    small, large = (
        fit_times(table_of(truth.whole), points, [0, 1, 2], [share * time for _, time in points]).rows[0].errors
        for share in (0.001, 0.002)
    )
    assert len(small) == len(truth.rows[0].counts) - 1
    assert small == pytest.approx(large)


def raw_cost(table: CostTable, plan: dict[str, int]) -> float:
    """The sum of the costs of a plan, cliffs included."""
    saved = (np.interp(plan[name], row.counts, row.savings) for row in table.rows for name in row.groups)
    return float(table.whole - sum(saved))


def test_rows_of_a_negligible_share_keep_their_costs() -> None:
    truth, table = random_table(0), table_of(10.0)
    points = [(plan, truth.cost(plan)) for plan in timed_plans(CLASSES, SHARES)]
    fitted = fit_times(table, points, [0, 1])
    assert fitted.rows[2] == table.rows[2]
    assert fitted.rows[0] != table.rows[0]


def test_every_class_is_timed_next_to_the_whole_model_and_alone() -> None:
    plans = timed_plans(CLASSES, SHARES)
    names = [group.name for members in CLASSES for group in members]
    full: dict[str, Any] = {group.name: group.units for members in CLASSES for group in members}
    for members in CLASSES:
        equal = [group.name for group in members]
        rest = [name for name in names if name not in equal]
        assert any(
            all(plan[name] == 0 for name in equal) and all(plan[name] == full[name] for name in rest) for plan in plans
        )
        assert any(
            all(plan[name] == full[name] for name in equal) and all(plan[name] == 0 for name in rest) for plan in plans
        )
    assert len(timed_plans(CLASSES, (0.5, 0.4, 0.001))) < len(plans)


@given(st.floats(0.1, 2.0), st.floats(-0.9, 0.9), st.floats(1.0, 8.0))
def test_a_curve_has_the_times_of_plans_and_never_falls(factor: float, exponent: float, least: float) -> None:
    row = GroupCosts(groups=("a", "b"), type="neurons", counts=(0, 32), savings=(40.0, 0.0))
    table = CostTable(unit="ms", batch=1, seq=128, dense=300.0, whole=100.0, rows=(row,))
    plans = [{"a": count, "b": count} for count in (2, 5, 8, 16, 24)]
    sums = [table.sum_of(plan) for plan in plans]
    times = [factor * total * (total / 100.0) ** exponent for total in sums]
    costs = with_curve(table, least, list(zip(plans, times, strict=True)))
    assert costs.least == pytest.approx(least)
    assert costs.cost({"a": 32, "b": 32}) == pytest.approx(100.0)
    expected = np.clip(times, least, 100.0)
    assert [costs.cost(plan) for plan in plans] == pytest.approx(expected)


@given(st.lists(st.floats(0.1, 500.0), min_size=8, max_size=8), st.floats(-50.0, 100.0), st.floats(0.1, 500.0))
def test_a_curve_never_falls_whatever_is_measured(times: list[float], saving: float, least: float) -> None:
    row = GroupCosts(groups=("a", "b"), type="neurons", counts=(0, 32), savings=(saving, 0.0))
    table = CostTable(unit="ms", batch=1, seq=128, dense=300.0, whole=100.0, rows=(row,))
    plans = [{"a": count, "b": count} for count in (0, 2, 2, 8, 16, 24, 32, 32)]
    costs = with_curve(table, least, list(zip(plans, times, strict=True)))
    values = [costs.cost({"a": count, "b": 32}) for count in range(33)]
    assert (np.diff(values) >= -1e-9).all()
    assert costs.cost({"a": 32, "b": 32}) == pytest.approx(100.0)
