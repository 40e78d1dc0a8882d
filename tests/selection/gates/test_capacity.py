"""Units of unequal costs within budgets: the selection, its relaxation, and the gates of every method."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.config.methods import METHODS, PENALISED_METHODS
from compressor.selection.gates import RankedGate
from compressor.selection.gates.capacity import FixedCount, UnitBudget, top
from compressor.selection.options import read_options
from tests.selection.gates.weights import HEADS, LAYERS, central_differences, gradient, make_gate, set_weights
from tests.selection.tiny import GATE_METHODS

costs_ = st.lists(st.integers(0, 50) | st.floats(0, 50), min_size=HEADS, max_size=HEADS)
weights_ = st.lists(st.floats(-1e3, 1e3), min_size=HEADS, max_size=HEADS)
shares_ = st.floats(0, 1)


def make_budget(costs: list[list[float]], shares: list[float]) -> UnitBudget:
    """Budgets that are shares of the cost of all units."""
    return UnitBudget(costs, [share * sum(row) for row, share in zip(costs, shares, strict=True)])


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gate_within(method: str, budget: UnitBudget, seed: int = 0) -> RankedGate:
    make = METHODS[method].load()
    gate: RankedGate = make(LAYERS, budget, 30, seed, read_options(method, {}, make.options_class))
    return gate


@settings(max_examples=40, deadline=None)
@given(costs=costs_, other_costs=costs_, shares=st.tuples(shares_, shares_), weights=weights_)
def test_a_selection_meets_every_budget_and_leaves_no_room(
    costs: list[float], other_costs: list[float], shares: tuple[float, float], weights: list[float]
) -> None:
    budget = make_budget([costs, other_costs], list(shares))
    mask = budget.select(vector(weights))
    spent = budget.costs[:, mask].sum(1)
    room = budget.limits * (1 + 1e-10) - spent
    assert (room >= 0).all()
    for unit in torch.nonzero(~mask).flatten():
        assert (budget.costs[:, unit] > room - 1e-9 * budget.limits).any()


@settings(max_examples=40, deadline=None)
@given(cost=st.floats(1e-3, 1e6), keep=st.integers(0, HEADS), weights=weights_)
def test_equal_costs_keep_exactly_the_k_largest(cost: float, keep: int, weights: list[float]) -> None:
    budget, values = UnitBudget([[cost] * HEADS], [keep * cost]), vector(weights)
    assert torch.equal(budget.select(values), top(values, keep))
    assert budget.has_choice == FixedCount(HEADS, keep).has_choice
    if budget.has_choice:
        assert budget.soft_select(values, 1.0).sum().item() == pytest.approx(keep)


@settings(max_examples=40, deadline=None)
@given(costs=costs_, other_costs=costs_, shares=st.tuples(shares_, shares_), weights=weights_, power=st.floats(-8, 3))
def test_a_relaxed_selection_uses_up_the_first_budget(
    costs: list[float], other_costs: list[float], shares: tuple[float, float], weights: list[float], power: float
) -> None:
    budget = make_budget([costs, other_costs], list(shares))
    gates = budget.soft_select(vector(weights), 10**power)
    assert ((gates >= 0) & (gates <= 1)).all()
    if budget.has_choice:
        # Near a tie at low temperatures the threshold is rounded.
        room = budget.limits - (budget.costs * gates).sum(1)
        tolerance = 1e-4 * budget.costs.max()
        assert (room >= -tolerance).all()
        assert room[budget.limits < budget.costs.sum(1)].min() <= tolerance


def test_a_low_temperature_is_hard_and_a_high_one_uniform() -> None:
    values = vector([0.3, 2.0, -1.0, 1.0])
    budget = UnitBudget([[1.0, 1.0, 1.0, 1.0]], [2.0])
    assert budget.soft_select(values, 1e-8).tolist() == pytest.approx([0, 1, 0, 1])
    assert budget.soft_select(values, 1e6).tolist() == pytest.approx([0.5] * 4, abs=1e-5)
    uneven = UnitBudget([[1.0, 4.0, 1.0, 1.0]], [4.5])
    assert uneven.soft_select(values, 1e-8).tolist() == pytest.approx([0, 1, 0, 0.5])
    assert uneven.select(values).tolist() == [False, True, False, False]


def test_the_gradient_of_a_relaxed_selection_is_that_of_finite_differences() -> None:
    budget = UnitBudget([[1.0, 4.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0, 5.0], [2.0] * HEADS], [9.0, 12.0])
    gate = gate_within("dsp", budget)
    direction = torch.linspace(-1, 2, HEADS, dtype=torch.float64)

    def output() -> Tensor:
        return budget.soft_select(gate.weight, 0.3) @ direction

    assert gradient(gate, output()) == pytest.approx(central_differences(gate, output), rel=1e-5, abs=1e-8)


def test_a_weight_rises_if_its_unit_is_worth_its_cost() -> None:
    """Both units lower the loss equally, and one costs three times as much."""
    budget = UnitBudget([[3.0, 1.0, 2.0]], [3.0])
    for name in ("dsp", "ste"):
        gate = METHODS[name].load()([3], budget, 30, 0)
        set_weights(gate, [0.0, 0.0, 0.0])
        gates = budget.soft_select(gate.weight, 1.0) if name == "dsp" else gate.sample(0)
        slopes = gradient(gate, -(gates @ vector([1.0, 1.0, 1.0])))
        assert slopes[0] > 0 > slopes[1], name


@pytest.mark.parametrize("method", GATE_METHODS)
@settings(max_examples=10, deadline=None)
@given(costs=costs_, share=shares_, weights=weights_, seed=st.integers(0, 2**31))
def test_every_gate_meets_its_budget_for_any_weights(
    method: str, costs: list[float], share: float, weights: list[float], seed: int
) -> None:
    budget = make_budget([costs], [share])
    gate = gate_within(method, budget, seed)
    for _ in range(2):
        mask = gate.harden()
        assert budget.costs[0, mask].sum() <= budget.limits[0] * (1 + 1e-10)
        assert torch.equal(gate.scale() != 0, mask)
        set_weights(gate, weights)


@pytest.mark.parametrize("method", GATE_METHODS)
def test_a_gate_within_a_budget_is_a_function_of_its_parameters_and_the_step(method: str) -> None:
    budget = make_budget([[3.0, 3, 3, 1, 1, 1, 1, 2, 2]], [0.6])
    gates = [gate_within(method, budget, seed=7) for _ in range(2)]
    for step in (0, 13, 29):
        torch.rand(step)  # other draws do not matter
        first, second = (gate.sample(step) for gate in gates)
        assert torch.equal(first, second)
        first.sum().backward()
    weight = gates[0].weight
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("method", GATE_METHODS)
@pytest.mark.parametrize(("cost", "limit", "value"), [(1.0, 9.0, 1.0), (1.0, 0.5, 0.0), (0.0, 1.0, 1.0)])
def test_gates_are_constant_if_all_or_no_units_fit(method: str, cost: float, limit: float, value: float) -> None:
    gate = gate_within(method, UnitBudget([[cost] * HEADS], [limit]))
    assert not gate.has_choice
    gates = gate.sample(0)
    assert gates.tolist() == [value] * HEADS
    assert all(map(math.isfinite, gradient(gate, gates.sum())))
    assert gate.penalty(0) == 0


@pytest.mark.parametrize("method", PENALISED_METHODS)
def test_units_are_penalised_by_their_cost(method: str) -> None:
    costs = [4.0, 1, 1, 1, 1, 1, 1, 1, 1]
    gate = gate_within(method, UnitBudget([costs], [6.0]))
    set_weights(gate, [0.5] * HEADS)
    slopes = gradient(gate, gate.penalty(3))
    assert slopes[0] == pytest.approx(4 * slopes[1])
    even, counted = gate_within(method, UnitBudget([[2.0] * HEADS], [8.0])), make_gate(method, 4)
    assert even.penalty(3).item() == pytest.approx(counted.penalty(3).item())


@pytest.mark.parametrize(
    ("costs", "limits"), [([1.0], [1.0]), ([[1.0]], [1.0, 2.0]), ([[-1.0]], [1.0]), ([[1.0]], [-1.0])]
)
def test_costs_that_are_no_costs_are_refused(costs: list[list[float]], limits: list[float]) -> None:
    with pytest.raises(ValueError, match="costs"):
        UnitBudget(costs, limits)
