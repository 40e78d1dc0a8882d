"""Gates: exactly K, whatever the weights; the relaxation's numbers; what a method must be to be registered."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import UsageError
from compressor.heads.gates import GATES, Gate, SubsetGate, base
from compressor.heads.gates.dsp import soft_top
from compressor.heads.gates.pooled import PooledGate, shares

LAYERS = (3, 4, 2)
HEADS = sum(LAYERS)
_weights = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0]), min_size=HEADS, max_size=HEADS)


def dsp(keep: int, **options: float) -> SubsetGate:
    return SubsetGate(LAYERS, keep, 30, 0, **options)


@pytest.mark.parametrize("name", GATES)
@settings(max_examples=60, deadline=None)
@given(weights=_weights, keep=st.integers(0, HEADS))
def test_hardens_to_exactly_k(name: str, weights: list[float], keep: int) -> None:
    gate = GATES[name](LAYERS, keep, 30, 0)
    with torch.no_grad():
        next(gate.parameters()).copy_(torch.tensor(weights))
    mask = gate.harden()
    assert mask.dtype == torch.bool
    assert mask.sum() == keep
    assert torch.equal(gate.scale() != 0, mask)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("keep", [0, 1, HEADS - 1, HEADS])
def test_a_gate_is_a_function_of_its_parameters_and_the_step(name: str, keep: int) -> None:
    gates = [GATES[name](LAYERS, keep, 30, 7) for _ in range(2)]
    assert isinstance(gates[0], Gate)
    for step in (0, 13, 29):
        torch.rand(step)  # whatever was drawn elsewhere
        first, second = (gate.sample(step) for gate in gates)
        assert first.shape == (HEADS,)
        assert torch.equal(first, second)
        first.sum().backward()
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in gates[0].parameters())
    assert all(weight.dtype == torch.float64 for weight in gates[0].parameters())


@settings(max_examples=100, deadline=None)
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


def test_soft_top_is_hard_when_cold() -> None:
    weights = torch.tensor([0.3, 2.0, -1.0, 1.0], dtype=torch.float64)
    assert soft_top(weights, 2, 1e-8).tolist() == [0, 1, 0, 1]


def test_near_a_tie_the_gradient_is_a_quarter_of_the_inverse_temperature() -> None:
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    soft_top(weights, 1, 0.01)[0].backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == pytest.approx([25.0, -25.0])


def test_ties_go_to_the_lower_index() -> None:
    assert base.top(torch.tensor([1.0, 2.0, 1.0, 1.0]), 2).tolist() == [True, True, False, False]
    assert base.top(torch.zeros(4), 3).tolist() == [True, True, True, False]


def test_cools_log_linearly_then_stays() -> None:
    gate = dsp(3, tau_ini=1000.0, tau_end=1e-8)
    assert gate.temperature(0) == 1000.0
    assert gate.temperature(10) == pytest.approx(math.sqrt(1000.0 * 1e-8))
    assert [gate.temperature(step) for step in (20, 25, 30)] == [1e-8] * 3
    assert [gate.cold(step) for step in (0, 19, 20, 30)] == [False, False, True, True]
    assert [gate.learning_rate_at(step) for step in (0, 15, 30)] == [1.0, 0.5, 0.0]


def test_noise_follows_the_gumbel_distribution() -> None:
    # P(first head drawn) = softmax(w): the Gumbel-max property, equation 6.
    gate = SubsetGate([2], 1, 30, 0, tau_ini=1e-8)
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([1.0, 0.0]))
        first = sum(gate.sample(step)[0].item() for step in range(4000)) / 4000
    assert first == pytest.approx(1 / (1 + math.exp(-1)), abs=0.02)


@pytest.mark.parametrize("keep", [0, HEADS])
def test_without_a_choice_the_gates_are_constant(keep: int) -> None:
    assert dsp(keep).sample(0).tolist() == [float(keep > 0)] * HEADS


def test_starts_at_small_seeded_noise() -> None:
    start = base.initial(LAYERS, 3)
    assert start.abs().max() <= math.sqrt(6 / (3 + 4))
    assert torch.equal(start, base.initial(LAYERS, 3))
    assert not torch.equal(start, base.initial(LAYERS, 4))


@pytest.mark.parametrize(
    ("keep", "options", "message"),
    [
        (-1, {}, "keep -1: the model has 9 heads; give a number from 0 to 9"),
        (10, {}, "keep 10"),
        (2, {"tau_end": 0.0}, "temperatures fall and stay above 0"),
        (2, {"tau_ini": 1e-9}, "temperatures fall"),
        (2, {"cooldown": 1.5}, "cooldown 1.5: a share of the steps"),
        (2, {"gate_learning_rate": 0.0}, "must be above 0"),
    ],
)
def test_refuses_options_out_of_range(keep: int, options: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dsp(keep, **options)


@pytest.mark.parametrize("keep", range(HEADS + 1))
def test_pools_keep_their_share_each(keep: int) -> None:
    # Sites 0 and 2 are encoders of 3 + 2 heads, site 1 is a decoder of 4.
    pools = ["encoder", "decoder", "encoder"]
    gate = PooledGate(lambda layers, count, seed: SubsetGate(layers, count, 30, seed), LAYERS, pools, keep, 0)
    with torch.no_grad():
        for weight, values in zip(gate.parameters(), ([0.1, 0.2, 0.3, 0.4, 0.5], [9.0, 8.0, 7.0, 6.0]), strict=True):
            weight.copy_(torch.tensor(values))
    mask = gate.harden()
    assert mask.sum() == keep
    encoder, decoder = mask[[0, 1, 2, 7, 8]], mask[3:7]
    assert [int(encoder.sum()), int(decoder.sum())] == shares(keep, [5, 4])
    assert encoder.tolist() == sorted(encoder.tolist())  # weights rise with the head's number
    assert decoder.tolist() == sorted(decoder.tolist(), reverse=True)
    for step in (0, 29):
        assert gate.sample(step)[3:7].sum().item() == pytest.approx(shares(keep, [5, 4])[1])
    assert torch.equal(gate.scale() != 0, mask)


def test_shares_go_by_largest_remainder() -> None:
    assert shares(5, [6, 6, 6]) == [2, 2, 1]
    assert shares(7, [10, 4]) == [5, 2]
    assert shares(0, [3, 4]) == [0, 0]
    assert shares(7, [3, 4]) == [3, 4]


def test_one_pool_is_the_gate_alone() -> None:
    pooled = PooledGate(lambda layers, count, seed: SubsetGate(layers, count, 30, seed), LAYERS, ["encoder"] * 3, 4, 5)
    assert torch.equal(pooled.sample(3), SubsetGate(LAYERS, 4, 30, 5).sample(3))
