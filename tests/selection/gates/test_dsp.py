"""Differentiable subset pruning: the relaxation, its temperature and its noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compressor.errors import ErrorCode, UsageError
from compressor.selection.gates.capacity import soft_top, top
from compressor.selection.gates.dsp import DspGate, DspOptions
from compressor.selection.options import read_options
from tests.faults import fails_with
from tests.selection.gates.weights import HEADS, LAYERS, central_differences, gradient


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(-50, 50), min_size=2, max_size=12),
    share=st.floats(0, 1),
    temperature=st.sampled_from([1000.0, 1.0, 0.1, 1e-3, 1e-8]),
)
def test_soft_top_sums_to_k(weights: list[float], share: float, temperature: float) -> None:
    keep = round(share * len(weights))
    gates = soft_top(torch.tensor(weights, dtype=torch.float64), keep, temperature)
    assert gates.sum().item() == pytest.approx(keep, abs=1e-9)
    assert (gates >= 0).all()


def test_a_single_gate_can_exceed_one() -> None:
    gates = soft_top(torch.log(torch.tensor([0.9, 0.1], dtype=torch.float64)), 2, 1.0)
    assert gates.tolist() == pytest.approx([1.4, 0.6])


def test_soft_top_is_hard_at_low_temperature() -> None:
    weights = torch.tensor([0.3, 2.0, -1.0, 1.0], dtype=torch.float64)
    assert soft_top(weights, 2, 1e-8).tolist() == [0, 1, 0, 1]


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(-1e9, 1e9) | st.floats(-1000, 1000), min_size=2, max_size=12),
    share=st.floats(0, 1),
    temperature=st.sampled_from([1e-8, 1e-12, 1e-100]),
)
def test_at_a_tiny_temperature_the_gates_of_the_k_largest_weights_are_one(
    weights: list[float], share: float, temperature: float
) -> None:
    """However far apart the weights are: nothing is drawn twice."""
    assume(min(np.diff(sorted(weights))) > 100 * temperature)
    keep, perturbed = round(share * len(weights)), torch.tensor(weights, dtype=torch.float64, requires_grad=True)
    gates = soft_top(perturbed, keep, temperature)
    assert torch.equal(gates.detach(), top(perturbed, keep).to(torch.float64))


@pytest.mark.parametrize("temperature", [1000.0, 1.0, 0.1, 1e-8])
@pytest.mark.parametrize("scale", [1.0, 709.0, 1e5])
@pytest.mark.parametrize("keep", [1, 4, 7, 8])
def test_gradients_are_finite_however_far_apart_the_weights_are(temperature: float, scale: float, keep: int) -> None:
    start = scale * torch.tensor([3.0, 2.0, 2.0, 1.0, 0.5, 0.0, -1.0, -4.0], dtype=torch.float64)
    weights = start.requires_grad_()
    gates = soft_top(weights, keep, temperature)
    (gates @ torch.linspace(-1, 2, 8, dtype=torch.float64)).backward()
    assert gates.sum().item() == pytest.approx(keep, abs=1e-9)
    assert weights.grad is not None
    assert weights.grad.isfinite().all()


def test_near_a_tie_the_gradient_is_a_quarter_of_the_inverse_temperature() -> None:
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    soft_top(weights, 1, 0.01)[0].backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == pytest.approx([25.0, -25.0])


def test_temperature_falls_log_linearly_and_then_stays() -> None:
    gate = DspGate(LAYERS, 3, 30, 0, DspOptions(tau_ini=1000.0, tau_end=1e-8))
    assert gate.temperature(0) == 1000.0
    assert gate.temperature(10) == pytest.approx(math.sqrt(1000.0 * 1e-8))
    assert [gate.temperature(step) for step in (20, 25, 30)] == [1e-8] * 3
    assert [gate.is_settled(step) for step in (0, 19, 20, 30)] == [False, False, True, True]
    assert [gate.learning_rate_at(step) for step in (0, 15, 30)] == [1.0, 0.5, 0.0]


def test_a_constant_schedule_keeps_the_learning_rate() -> None:
    gate = DspGate(LAYERS, 3, 30, 0, DspOptions(gate_schedule="constant"))
    assert [gate.learning_rate_at(step) for step in (0, 15, 30)] == [1.0, 1.0, 1.0]


def test_noise_follows_the_gumbel_distribution() -> None:
    # P(first head drawn) = softmax(w): the Gumbel-max property, equation 6.
    gate = DspGate([2], 1, 30, 0, DspOptions(tau_ini=1e-8))
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([1.0, 0.0]))
        first = sum(gate.sample(step)[0].item() for step in range(4000)) / 4000
    assert first == pytest.approx(1 / (1 + math.exp(-1)), abs=0.02)


@pytest.mark.parametrize("step", [0, 7])
def test_gradients_of_samples_equal_finite_differences(step: int) -> None:
    gate = DspGate(LAYERS, 4, 30, 0, DspOptions(tau_ini=2.0, tau_end=0.5))
    direction = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    slopes = gradient(gate, gate.sample(step) @ direction)
    assert any(slopes)
    assert central_differences(gate, lambda: gate.sample(step) @ direction) == pytest.approx(slopes, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"tau_end": 0.0}, ErrorCode.OUT_OF_RANGE, "tau_end"),
        ({"tau_ini": 1e-9}, ErrorCode.CONTRADICTION, "tau_ini"),
        ({"tau_ini": float("nan")}, ErrorCode.OUT_OF_RANGE, "tau_ini"),
        ({"cooldown": 1.5}, ErrorCode.OUT_OF_RANGE, "cooldown"),
        ({"gate_schedule": "cosine"}, ErrorCode.UNKNOWN_NAME, "gate_schedule"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], code: ErrorCode, field: str) -> None:
    with fails_with(code, UsageError, field=field, subject="dsp"):
        read_options("dsp", options, DspOptions)
