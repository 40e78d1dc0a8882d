"""Hard concrete and BinConcrete gates: their distributions, the penalty, and the scale of open heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compressor.config.methods import METHODS, PENALISED_METHODS
from compressor.errors import ErrorCode, UsageError
from compressor.selection.gates import base
from compressor.selection.gates.concrete import BinConcreteGate, BinConcreteOptions, HardConcreteGate, scale_groups
from compressor.selection.options import read_options
from tests.faults import fails_with
from tests.selection.gates.weights import (
    HEADS,
    LAYERS,
    central_differences,
    gradient,
    make_concrete,
    set_weights,
)

UNSCALED = BinConcreteOptions(output_scaling=False)


@settings(max_examples=15, deadline=None)
@given(
    weights=st.lists(st.floats(-5, 5), min_size=HEADS, max_size=HEADS),
    keep=st.integers(1, HEADS - 1),
    step=st.integers(0, 5),
)
def test_bin_concrete_is_zero_or_one_with_the_gradient_before_rounding(
    weights: list[float], keep: int, step: int
) -> None:
    gate = BinConcreteGate(LAYERS, keep, 30, 0, UNSCALED)
    set_weights(gate, weights)
    gates = gate.sample(step)
    assert set(gates.tolist()) <= {0.0, 1.0}
    uniform = base.noise(HEADS, 0, step)
    assert torch.equal(gates == 1, torch.logit(uniform) + gate.weight > 0)
    slopes = gradient(gate, gates.sum())
    assert central_differences(gate, lambda: gate.concrete(uniform).sum()) == pytest.approx(slopes, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(mask=st.lists(st.booleans(), min_size=HEADS, max_size=HEADS))
def test_open_heads_compensate_for_closed_heads(mask: list[bool]) -> None:
    gates = torch.tensor(mask, dtype=torch.float64)
    for part, scaled in zip(gates.split(LAYERS), scale_groups(gates, LAYERS).split(LAYERS), strict=True):
        heads, count = len(part), int(part.sum())
        assert scaled.tolist() == pytest.approx([gate * heads / max(1, count) for gate in part.tolist()])
        assert scaled.sum() == pytest.approx(heads if count else 0.0)


def test_a_site_that_is_almost_closed_is_scaled_by_its_heads_at_most() -> None:
    gates = torch.tensor([0.25, 0.25, 0.0, 1.0], dtype=torch.float64)
    assert scale_groups(gates, [3, 1]).tolist() == pytest.approx([0.75, 0.75, 0.0, 1.0])


@settings(max_examples=20, deadline=None)
@given(gates=st.lists(st.floats(0.4, 1.0), min_size=HEADS, max_size=HEADS))
def test_gradients_through_the_scale_equal_finite_differences(gates: list[float]) -> None:
    parts = np.split(np.array(gates), np.cumsum(LAYERS)[:-1])
    assume(all(abs(part.sum() - 1.0) > 1e-3 for part in parts))  # at one open head the scale has a kink
    gate = BinConcreteGate(LAYERS, None, 30, 0)
    set_weights(gate, gates)  # interpreted as gates
    direction = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    slopes = gradient(gate, scale_groups(gate.weight, LAYERS) @ direction)
    numeric = central_differences(gate, lambda: scale_groups(gate.weight, LAYERS) @ direction)
    assert numeric == pytest.approx(slopes, abs=1e-6)


def test_samples_and_final_gates_have_the_same_scale() -> None:
    gate, plain = BinConcreteGate(LAYERS, 4, 30, 0), BinConcreteGate(LAYERS, 4, 30, 0, UNSCALED)
    set_weights(gate, weights := [2.0, -1.0, 1.0, -1.0, -1.0, 3.0, -2.0, -2.0, 0.5])
    set_weights(plain, weights)
    assert gate.scale().tolist() == pytest.approx([1.5, 0, 1.5, 0, 0, 4, 0, 0, 2])
    for step in range(30):
        assert torch.equal(gate.sample(step), scale_groups(plain.sample(step), LAYERS))
    assert torch.equal(gate.harden(), plain.harden())


@pytest.mark.parametrize("method", PENALISED_METHODS)
@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.floats(-30, 30, width=32), min_size=HEADS, max_size=HEADS))
def test_without_a_number_to_keep_the_open_heads_stay(method: str, weights: list[float]) -> None:
    gate = make_concrete(method, None, cooldown=0.4)
    set_weights(gate, weights)
    assert gate.harden().tolist() == [weight > 0 for weight in weights]
    assert torch.equal(gate.scale() != 0, gate.harden())
    assert gate.harden().sum() == gate.counts()["open"]
    assert gate.has_choice
    assert gate.penalty(39) > gate.penalty(40) == 0
    assert torch.equal(gate.sample(40), gate.scale())


def test_hard_concrete_has_mass_at_both_ends() -> None:
    gate = HardConcreteGate(LAYERS, 4, 30, 0)
    set_weights(gate, [2.0] * HEADS)
    count = 10**6
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = gate.draw(uniform[:, None])[:, 0]
    assert (drawn == 0).double().mean().item() == pytest.approx(0.057405, abs=2e-6)
    assert (drawn == 1).double().mean().item() == pytest.approx(0.768792, abs=2e-6)
    assert (drawn > 0).double().mean().item() == pytest.approx(0.942595, abs=2e-6)
    assert gate.open_probability().tolist() == pytest.approx([0.942595] * HEADS, abs=5e-7)


def test_bin_concrete_starts_open() -> None:
    gate = BinConcreteGate(LAYERS, 4, 30, 0, UNSCALED)
    assert gate.weight.tolist() == [2.0] * HEADS
    count = 10**5
    drawn = gate.draw(((torch.arange(count, dtype=torch.float64) + 0.5) / count)[:, None])[:, 0]
    assert drawn.detach().mean().item() == pytest.approx(0.8808, abs=1e-5)
    assert gate.counts() == {"open": 9.0, "expected": pytest.approx(9 * 0.942595, abs=1e-5)}


@pytest.mark.parametrize("step", [0, 7])
def test_gradients_of_hard_concrete_samples_equal_finite_differences(step: int) -> None:
    gate = HardConcreteGate(LAYERS, 4, 30, 0)
    direction = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    slopes = gradient(gate, gate.sample(step) @ direction)
    assert any(slopes)
    assert central_differences(gate, lambda: gate.sample(step) @ direction) == pytest.approx(slopes, abs=1e-6)


@pytest.mark.parametrize("method", PENALISED_METHODS)
@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.floats(-5, 5), min_size=HEADS, max_size=HEADS))
def test_the_penalty_closes_heads(method: str, weights: list[float]) -> None:
    gate = make_concrete(method, 4, penalty=0.5, penalty_warmup=0.1, cooldown=0.4)
    set_weights(gate, weights)
    slopes = gradient(gate, gate.penalty(10))
    assert min(slopes) > 0
    assert central_differences(gate, lambda: gate.penalty(10)) == pytest.approx(slopes, abs=1e-6)


@pytest.mark.parametrize("method", PENALISED_METHODS)
def test_the_penalty_rises_then_stops_when_gates_are_frozen(method: str) -> None:
    gate = make_concrete(method, 4, penalty=0.5, penalty_warmup=0.1, cooldown=0.4)
    whole = 0.5 * gate.counts()["expected"]
    shares = [gate.penalty(step).item() / whole for step in (0, 5, 10, 39, 40, 99)]
    assert shares == pytest.approx([0, 0.5, 1, 1, 0, 0])
    assert [gate.is_settled(step) for step in (0, 39, 40, 100)] == [False, False, True, True]
    assert [gate.learning_rate_at(step) for step in (0, 20, 40, 99)] == [1.0, 0.5, 0.0, 0.0]
    assert all(torch.equal(gate.sample(step), gate.scale()) for step in range(40, 100))
    assert not torch.equal(gate.sample(39), gate.scale())


@pytest.mark.parametrize("method", PENALISED_METHODS)
def test_a_penalty_without_warm_up_is_full_from_the_start(method: str) -> None:
    gate = make_concrete(method, 4, penalty=0.5, penalty_warmup=0.0)
    assert gate.penalty(0).item() == pytest.approx(0.5 * gate.counts()["expected"])


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.floats(-3, 3) | st.sampled_from([0.0, 1.0]), min_size=HEADS, max_size=HEADS),
    keep=st.integers(0, HEADS),
)
def test_a_minimum_of_heads_changes_in_order_to_keep_k(weights: list[float], keep: int) -> None:
    gate = HardConcreteGate(LAYERS, keep, 30, 0)
    set_weights(gate, weights)
    is_open, kept = gate.weight > 0, gate.harden()
    assert (kept != is_open).sum() == abs(int(is_open.sum()) - keep)
    if kept.any() and not kept.all():
        assert gate.weight[kept].min() >= gate.weight[~kept].max()


@pytest.mark.parametrize("method", PENALISED_METHODS)
@pytest.mark.parametrize(
    ("field", "value"), [("penalty", -0.1), ("penalty_warmup", 2.0), ("cooldown", -1.0), ("beta", 0.0)]
)
def test_options_out_of_range_are_refused(method: str, field: str, value: float) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field=field, value=value, subject=method):
        read_options(method, {field: value}, METHODS[method].load().options_class)


@pytest.mark.parametrize(("field", "value"), [("gamma", 0.0), ("zeta", 1.0)])
def test_the_interval_contains_zero_and_one(field: str, value: float) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field=field, value=value):
        read_options("hard-concrete", {field: value}, HardConcreteGate.options_class)
