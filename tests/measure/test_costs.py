"""Cost tables: costs add up, never grow as units are removed, and are stored with what they depend on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.measure.costs import CostTable, GroupCosts, load_tables, save_tables

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


def test_tables_are_read_only_under_their_own_key(tmp_path: Path) -> None:
    path, key = tmp_path / "cache" / "costs.json", {"machine": "a", "threads": "2"}
    assert load_tables(path, key) == ((), ())
    tables = (table(group([2.0, 1.0])),)
    save_tables(path, key, tables)
    assert load_tables(path, key) == (tables, ())
    assert load_tables(path, {**key, "threads": "4"}) == ((), ("threads",))
    path.write_text("{")
    assert load_tables(path, key) == ((), ())


def test_a_group_without_a_row_has_no_saving() -> None:
    with pytest.raises(KeyError, match="missing"):
        table().saving("missing", 1)
