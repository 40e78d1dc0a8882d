"""Budgets: the plan that is delivered meets them as measured, or the error names the least that is possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from compressor.config.steps import Units
from compressor.errors import BudgetError, ErrorCode
from compressor.measure.costs import CostTable, GroupCosts
from compressor.pruning.allocate import (
    MAX_ATTEMPTS,
    MAX_BUDGET_RATIO,
    MIN_BUDGET_RATIO,
    Constraint,
    allocate_until_met,
    budget_notes,
    choose_counts,
    head_table,
    keep_all_within,
    require_reachable,
)
from compressor.results import NoteCode
from compressor.run.steps.units import budget_rows, budgets_of
from compressor.units import PrunableGroup
from tests.faults import fails_with

GROUPS = [PrunableGroup(name, "neurons", 32, 1, 8, name) for name in "abc"]
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.zoo) for seed in range(3, 10))]


def random_problem(seed: int) -> tuple[dict[str, dict[int, float]], CostTable]:
    """Loss curves that fall, and savings that fall, with the number of units."""
    rng = np.random.default_rng(seed)
    losses, rows = {}, []
    for group in GROUPS:
        falling = np.sort(rng.random(len(group.counts)))[::-1]
        losses[group.name] = dict(zip(group.counts, falling - falling[-1], strict=True))
        savings = np.sort(rng.random(len(group.counts)))[::-1]
        rows.append(
            GroupCosts(groups=(group.name,), type="neurons", counts=group.counts, savings=tuple(savings - savings[-1]))
        )
    table = CostTable(unit="ms", batch=1, seq=128, dense=6.0, whole=5.0, rows=tuple(rows))
    return losses, table


@pytest.mark.parametrize("seed", SEEDS)
def test_a_budget_between_the_least_and_dense_is_met(seed: int) -> None:
    losses, table = random_problem(seed)
    budget = table.least + 0.4 * (table.whole - table.least)
    counts = choose_counts(GROUPS, losses, [Constraint(table, budget)])
    assert all(counts[group.name] in group.counts for group in GROUPS)
    assert table.cost(counts) <= budget + 1e-9
    smaller = choose_counts(GROUPS, losses, [Constraint(table, table.least)])
    assert sum(losses[name][count] for name, count in counts.items()) <= sum(
        losses[name][count] for name, count in smaller.items()
    )


@pytest.mark.parametrize("factor", [0.8, 0.95, 1.0, 1.1, 1.3])
def test_costs_that_are_predicted_badly_are_corrected_by_measuring(factor: float) -> None:
    losses, table = random_problem(3)
    budget = factor * (table.least + 0.5 * (table.whole - table.least))
    rounds = []

    def measure(counts: Mapping[str, int]) -> list[float]:
        rounds.append(counts)
        return [factor * table.cost(counts)]

    allocation = allocate_until_met(GROUPS, losses, [Constraint(table, budget)], measure)
    assert allocation.measured[0] <= MAX_BUDGET_RATIO * budget
    assert len(rounds) <= MAX_ATTEMPTS
    assert allocation.measured == (factor * table.cost(allocation.counts),)
    assert allocation.predicted == (table.cost(allocation.counts),)


@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("power", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("share", [0.05, pytest.param(0.3, marks=pytest.mark.zoo), 0.6])
def test_budgets_are_used_where_predictions_err_differently_by_size(share: float, power: float, fixed: float) -> None:
    group = PrunableGroup("a", "neurons", 1024, 1, 8, "a")
    losses = {"a": {count: 1.0 - count / 1024 for count in group.counts}}
    row = GroupCosts(groups=("a",), type="neurons", counts=(0, 1024), savings=(4.8, 0.0))
    table = CostTable(unit="ms", batch=1, seq=128, dense=6.0, whole=5.0, rows=(row,))

    def measure(counts: Mapping[str, int]) -> list[float]:
        return [fixed + 5.0 * (table.cost(counts) / 5.0) ** power]

    least, whole = (measure({"a": count})[0] for count in (0, 1024))
    budget = least + share * (whole - least)
    allocation = allocate_until_met([group], losses, [Constraint(table, budget)], measure)
    assert allocation.measured[0] <= MAX_BUDGET_RATIO * budget
    wider = group.counts[min(group.counts.index(allocation.counts["a"]) + 1, len(group.counts) - 1)]
    assert allocation.measured[0] >= MIN_BUDGET_RATIO * budget or measure({"a": wider})[0] > MAX_BUDGET_RATIO * budget


@pytest.mark.parametrize("seed", SEEDS)
def test_budgets_are_met_when_times_repeat_within_a_percent(seed: int) -> None:
    losses, table = random_problem(seed)
    rng = np.random.default_rng(seed)
    budget = table.least + 0.5 * (table.whole - table.least)

    def measure(counts: Mapping[str, int]) -> list[float]:
        return [1.1 * rng.uniform(0.99, 1.01) * table.cost(counts)]

    allocation = allocate_until_met(GROUPS, losses, [Constraint(table, budget)], measure)
    assert max(measure(allocation.counts)[0] for _ in range(20)) <= MAX_BUDGET_RATIO * budget


def test_the_smallest_plan_is_measured_before_a_budget_is_missed() -> None:
    losses, table = random_problem(2)
    nothing = {group.name: 0 for group in GROUPS}
    rounds = []

    def measure(counts: Mapping[str, int]) -> list[float]:
        rounds.append(counts)
        return [(1.0 if counts == nothing else 1.3) * table.cost(counts)]

    allocation = allocate_until_met(GROUPS, losses, [Constraint(table, 1.1 * table.least)], measure)
    assert rounds[0] != nothing
    assert allocation.counts == nothing


def test_every_size_holds() -> None:
    losses, table = random_problem(1)
    _, second = random_problem(2)
    constraints = [Constraint(part, part.least + 0.5 * (part.whole - part.least)) for part in (table, second)]
    counts = choose_counts(GROUPS, losses, constraints)
    assert all(constraint.predicted_cost(counts) <= constraint.budget + 1e-9 for constraint in constraints)


def test_a_budget_below_the_least_is_refused_with_the_least() -> None:
    losses, table = random_problem(0)
    with pytest.raises(BudgetError) as error:
        choose_counts(GROUPS, losses, [Constraint(table, table.whole), Constraint(table, 0.9 * table.least)])
    assert error.value.code is ErrorCode.BUDGET_UNREACHABLE
    assert error.value.details == {
        "budgets": (table.whole, 0.9 * table.least),
        "least": pytest.approx((table.least, table.least)),
        "parts": 2 * ({"rest": pytest.approx(table.least), "heads": 0, "neurons": 0},),
        "exceeded": (1,),
    }


@pytest.mark.parametrize("removable", range(4))
def test_the_parts_of_the_least_are_what_may_not_be_removed_and_the_rest(removable: int) -> None:
    _, table = random_problem(4)
    heads = table.rows[0].model_copy(update={"type": "heads"})
    table = table.model_copy(update={"rows": (heads, *table.rows[1:])})
    with pytest.raises(BudgetError) as error:
        require_reachable(GROUPS[:removable], [Constraint(table, 0.5 * table.least, correction=1.1)])
    (parts,), (least,) = error.value.details["parts"], error.value.details["least"]
    kept = [1.1 * row.saving(0) for row in table.rows[removable:]]
    assert sum(parts.values()) == pytest.approx(least)
    assert parts["rest"] == pytest.approx(1.1 * table.least)
    assert parts["heads"] == pytest.approx(kept[0] if removable == 0 else 0.0)
    assert parts["neurons"] == pytest.approx(sum(kept[1:] if removable == 0 else kept))
    assert all(f"{part:.4g}" in str(error.value) for part in parts.values() if part)


def test_a_budget_above_dense_keeps_everything() -> None:
    losses, table = random_problem(0)
    allocation = allocate_until_met(
        GROUPS, losses, [Constraint(table, 2 * table.whole)], lambda counts: [table.cost(counts)]
    )
    assert allocation.counts == {group.name: group.units for group in GROUPS}


def test_nothing_is_removed_from_a_model_that_just_meets_its_budget() -> None:
    losses, table = random_problem(0)
    budget = 1.005 * table.whole
    allocation = allocate_until_met(GROUPS, losses, [Constraint(table, budget)], lambda counts: [table.cost(counts)])
    assert allocation.counts == {group.name: group.units for group in GROUPS}


@pytest.mark.parametrize("heads", [0, 1, 3])
def test_fewer_heads_than_a_bundle_leave_none(heads: int) -> None:
    group = PrunableGroup("a", "heads", 8, 4, 4, "a", bundle=4)
    constraint = Constraint(head_table([group]), heads)
    losses = {"a": {0: 1.0, 4: 0.5, 8: 0.0}}
    allocation = allocate_until_met([group], losses, [constraint], lambda counts: [constraint.table.cost(counts)])
    assert allocation.counts == {"a": 0}
    assert [note.code for note in budget_notes([constraint], allocation)] == [NoteCode.BUDGET_MET]
    assert all(row.met for row in budget_rows([constraint], allocation))


@pytest.mark.parametrize(
    ("fields", "unit", "budget"),
    [
        ({"speedup": 2}, "ms", 3.0),
        ({"latency": "2.5ms"}, "ms", 2.5),
        # A count's share is one of the dense model, although heads that are selected first cost less already.
        ({"macs": "50%"}, "macs", 3.0),
        ({"parameters": 0.25}, "parameters", 1.5),
        ({"cache": 0.25}, "cache", 1.5),
    ],
)
def test_the_budgets_of_a_recipe(fields: dict[str, Any], unit: str, budget: float) -> None:
    _, table = random_problem(0)
    tables = [table.model_copy(update={"unit": name}) for name in ("parameters", "macs", "cache", "ms")]
    step = Units(**fields)
    if not step.is_timed:
        tables.pop()
    constraints = budgets_of(step).constraints(tables)
    assert [(constraint.table.unit, constraint.budget) for constraint in constraints] == [(unit, budget)]


def test_heads_are_counted_by_a_table_of_their_own() -> None:
    heads = [PrunableGroup(name, "heads", 4, 8, 1, name) for name in "ab"]
    table = head_table([*heads, *GROUPS])
    assert (table.whole, table.cost({"a": 1, "b": 4})) == (8.0, 5.0)


@pytest.mark.parametrize(
    ("budget", "measured", "is_kept"), [(5.0, 5.0, True), (4.9, 4.0, False), (6.0, 6.1, False), (6.0, 5.9, True)]
)
def test_every_unit_is_kept_where_the_whole_model_meets_the_budget(
    budget: float, measured: float, *, is_kept: bool
) -> None:
    _, table = random_problem(0)
    allocation = keep_all_within(GROUPS, [Constraint(table, budget)], lambda counts: [measured])
    assert (allocation is not None) is is_kept
    if allocation is not None:
        assert allocation.counts == {group.name: 32 for group in GROUPS}
        assert (allocation.predicted, allocation.measured) == ((5.0,), (measured,))


def test_a_loss_that_is_not_finite_is_refused_by_the_name_of_its_group() -> None:
    losses, table = random_problem(0)
    losses["b"][8] = float("nan")
    with fails_with(ErrorCode.NOT_FINITE, group="b", count=8):
        choose_counts(GROUPS, losses, [Constraint(table, 4.0)])


@pytest.mark.parametrize("costs", [[], [float("nan")], [float("inf")], [0.0], [1.0, 1.0]], ids=str)
def test_values_that_are_no_costs_are_refused(costs: list[float]) -> None:
    losses, table = random_problem(0)
    with fails_with(ErrorCode.INVALID_VALUE, field="measure"):
        allocate_until_met(GROUPS, losses, [Constraint(table, table.whole * 0.9)], lambda _: costs)


@pytest.mark.parametrize("budget", [float("nan"), float("inf"), -1.0])
def test_a_budget_that_is_no_cost_is_refused(budget: float) -> None:
    with fails_with(ErrorCode.INVALID_VALUE, field="budget"):
        Constraint(random_problem(0)[1], budget)
