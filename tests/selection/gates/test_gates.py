"""Properties of every gate: exactly K heads for any weights; gates are a function of parameters and step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.config.methods import METHODS
from compressor.errors import ErrorCode, UsageError
from compressor.selection.gates import RankedGate
from compressor.selection.gates.capacity import top
from compressor.selection.gates.dsp import StraightThroughGate
from compressor.selection.options import read_options
from tests.faults import fails_with
from tests.selection.gates.weights import HEADS, LAYERS, gradient, make_gate
from tests.selection.tiny import GATE_METHODS

weights_ = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0]), min_size=HEADS, max_size=HEADS)


@pytest.mark.parametrize("method", GATE_METHODS)
@settings(max_examples=20, deadline=None)
@given(weights=weights_, keep=st.integers(0, HEADS))
def test_hardens_to_exactly_k(method: str, weights: list[float], keep: int) -> None:
    gate = make_gate(method, keep)
    with torch.no_grad():
        next(gate.parameters()).copy_(torch.tensor(weights))
    mask = gate.harden()
    assert mask.dtype == torch.bool
    assert mask.sum() == keep
    assert torch.equal(gate.scale() != 0, mask)


@pytest.mark.parametrize("method", GATE_METHODS)
@settings(max_examples=20, deadline=None)
@given(layers=st.lists(st.integers(1, 6), min_size=1, max_size=5), share=st.floats(0, 1), step=st.integers(0, 29))
def test_hardens_to_any_k_for_any_layers(method: str, layers: list[int], share: float, step: int) -> None:
    keep = round(share * sum(layers))
    gate = make_gate(method, keep, layers=layers)
    assert gate.harden().sum() == keep
    assert gate.sample(step).shape == (sum(layers),)
    assert (gate.sample(step) >= 0).all()


@pytest.mark.parametrize("method", GATE_METHODS)
@pytest.mark.parametrize("keep", [0, 1, HEADS - 1, HEADS])
def test_a_gate_is_a_function_of_its_parameters_and_the_step(method: str, keep: int) -> None:
    gates = [make_gate(method, keep, seed=7) for _ in range(2)]
    assert isinstance(gates[0], RankedGate)
    for step in (0, 13, 29):
        torch.rand(step)  # other draws do not matter
        first, second = (gate.sample(step) for gate in gates)
        assert first.shape == (HEADS,)
        assert torch.equal(first, second)
        first.sum().backward()
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in gates[0].parameters())
    assert all(weight.dtype == torch.float64 for weight in gates[0].parameters())


@pytest.mark.parametrize("method", GATE_METHODS)
@pytest.mark.parametrize("keep", [0, HEADS])
def test_gates_are_constant_if_all_or_no_heads_are_kept(method: str, keep: int) -> None:
    gate = make_gate(method, keep)
    assert gate.sample(0).tolist() == [float(keep > 0)] * HEADS
    assert gate.penalty(0) == 0


@pytest.mark.parametrize("method", GATE_METHODS)
@pytest.mark.parametrize("keep", [-1, HEADS + 1])
def test_a_number_to_keep_out_of_range_is_refused(method: str, keep: int) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field="keep", value=keep, maximum=HEADS):
        make_gate(method, keep)


@pytest.mark.parametrize("method", GATE_METHODS)
@pytest.mark.parametrize(("field", "value"), [("gate_learning_rate", 0.0), ("gate_max_grad_norm", -1.0)])
def test_every_gate_refuses_a_rate_that_does_not_learn(method: str, field: str, value: float) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field=field, value=value, subject=method):
        read_options(method, {field: value}, METHODS[method].load().options_class)


def test_ties_go_to_the_lower_index() -> None:
    assert top(torch.tensor([1.0, 2.0, 1.0, 1.0]), 2).tolist() == [True, True, False, False]
    assert top(torch.zeros(4), 3).tolist() == [True, True, True, False]


def test_starts_at_small_seeded_noise() -> None:
    start, same, different = (StraightThroughGate(LAYERS, 4, 30, seed).weight for seed in (3, 3, 4))
    assert start.abs().max() <= math.sqrt(6 / (3 + 4))
    assert torch.equal(start, same)
    assert not torch.equal(start, different)


def test_straight_through_is_hard_forward_and_the_identity_backward() -> None:
    gate = StraightThroughGate(LAYERS, 4, 30, 0)
    upstream = torch.arange(HEADS, dtype=torch.float64)
    for step in (0, 29):
        gates = gate.sample(step)
        assert torch.equal(gates, gate.scale())
        assert gradient(gate, gates @ upstream) == upstream.tolist()
        assert gate.is_settled(step)
