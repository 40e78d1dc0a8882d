"""Gates: exactly K, whatever the weights; the relaxation's numbers; what a method must be to be registered."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compressor.errors import UsageError
from compressor.selection.gates import GATES as METHODS
from compressor.selection.gates import BinConcreteGate, DspGate, Gate, HardConcreteGate, StraightThroughGate, base
from compressor.selection.gates.bin_concrete import scaled
from compressor.selection.gates.concrete import ConcreteGate
from compressor.selection.gates.dsp import soft_top
from compressor.selection.gates.per_kind import PooledGate, shares

GATES = {name: method.make for name, method in METHODS.items()}
MakeConcrete = Callable[..., ConcreteGate]
CONCRETE: list[MakeConcrete] = [HardConcreteGate, BinConcreteGate]
LAYERS = (3, 4, 2)
HEADS = sum(LAYERS)
_weights = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0]), min_size=HEADS, max_size=HEADS)


def dsp(keep: int, **options: Any) -> DspGate:
    return DspGate(LAYERS, keep, 30, 0, **options)


@pytest.mark.parametrize("name", GATES)
@settings(max_examples=40, deadline=None)
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
@settings(max_examples=20, deadline=None)
@given(layers=st.lists(st.integers(1, 6), min_size=1, max_size=5), share=st.floats(0, 1), step=st.integers(0, 29))
def test_any_layers_any_k(name: str, layers: list[int], share: float, step: int) -> None:
    keep = round(share * sum(layers))
    gate = GATES[name](layers, keep, 30, 0)
    assert gate.harden().sum() == keep
    assert gate.sample(step).shape == (sum(layers),)
    assert (gate.sample(step) >= 0).all()


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
    assert [gate.is_settled(step) for step in (0, 19, 20, 30)] == [False, False, True, True]
    assert [gate.learning_rate_at(step) for step in (0, 15, 30)] == [1.0, 0.5, 0.0]


def test_noise_follows_the_gumbel_distribution() -> None:
    # P(first head drawn) = softmax(w): the Gumbel-max property, equation 6.
    gate = DspGate([2], 1, 30, 0, tau_ini=1e-8)
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([1.0, 0.0]))
        first = sum(gate.sample(step)[0].item() for step in range(4000)) / 4000
    assert first == pytest.approx(1 / (1 + math.exp(-1)), abs=0.02)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("keep", [0, HEADS])
def test_without_a_choice_the_gates_are_constant(name: str, keep: int) -> None:
    gate = GATES[name](LAYERS, keep, 30, 0)
    assert gate.sample(0).tolist() == [float(keep > 0)] * HEADS
    assert gate.penalty(0) == 0


def test_straight_through_is_hard_forward_and_the_identity_backward() -> None:
    gate = StraightThroughGate(LAYERS, 4, 30, 0)
    upstream = torch.arange(HEADS, dtype=torch.float64)
    for step in (0, 29):
        gates = gate.sample(step)
        assert torch.equal(gates, gate.scale())
        assert _gradient(gate, gates @ upstream) == upstream.tolist()
        assert gate.is_settled(step)


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.floats(-5, 5), min_size=HEADS, max_size=HEADS),
    keep=st.integers(1, HEADS - 1),
    step=st.integers(0, 5),
)
def test_bin_concrete_is_zero_or_one_with_the_gradient_of_what_was_rounded(
    weights: list[float], keep: int, step: int
) -> None:
    gate = BinConcreteGate(LAYERS, keep, 30, 0, output_scaling=False)
    _put(gate, weights)
    gates = gate.sample(step)
    assert set(gates.tolist()) <= {0.0, 1.0}
    uniform = base.noise(HEADS, 0, step)
    assert torch.equal(gates == 1, torch.logit(uniform) + gate.weight > 0)
    assert _slopes(gate, lambda: gate.concrete(uniform).sum()) == pytest.approx(_gradient(gate, gates.sum()), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(mask=st.lists(st.booleans(), min_size=HEADS, max_size=HEADS))
def test_what_is_open_stands_in_for_what_is_closed(mask: list[bool]) -> None:
    gates = torch.tensor(mask, dtype=torch.float64)
    for part, found in zip(gates.split(LAYERS), scaled(gates, LAYERS).split(LAYERS), strict=True):
        heads, count = len(part), int(part.sum())
        assert found.tolist() == pytest.approx([gate * heads / max(1, count) for gate in part.tolist()])
        assert found.sum() == pytest.approx(heads if count else 0.0)


def test_a_site_that_is_all_but_closed_is_scaled_by_its_heads_and_no_more() -> None:
    gates = torch.tensor([0.25, 0.25, 0.0, 1.0], dtype=torch.float64)
    assert scaled(gates, [3, 1]).tolist() == pytest.approx([0.75, 0.75, 0.0, 1.0])


@settings(max_examples=40, deadline=None)
@given(gates=st.lists(st.floats(0.4, 1.0), min_size=HEADS, max_size=HEADS))
def test_gradients_through_the_scale_are_those_of_finite_differences(gates: list[float]) -> None:
    parts = np.split(np.array(gates), np.cumsum(LAYERS)[:-1])
    assume(all(abs(part.sum() - 1.0) > 1e-3 for part in parts))  # a layer is scaled from one open head on: a kink
    gate = BinConcreteGate(LAYERS, None, 30, 0)
    _put(gate, gates)  # read as gates themselves
    toward = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    found = _gradient(gate, scaled(gate.weight, LAYERS) @ toward)
    assert _slopes(gate, lambda: scaled(gate.weight, LAYERS) @ toward) == pytest.approx(found, abs=1e-6)


def test_samples_and_the_final_gates_are_scaled_alike() -> None:
    gate, plain = (BinConcreteGate(LAYERS, 4, 30, 0, output_scaling=on) for on in (True, False))
    _put(gate, weights := [2.0, -1.0, 1.0, -1.0, -1.0, 3.0, -2.0, -2.0, 0.5])
    _put(plain, weights)
    assert gate.scale().tolist() == pytest.approx([1.5, 0, 1.5, 0, 0, 4, 0, 0, 2])
    for step in range(30):
        assert torch.equal(gate.sample(step), scaled(plain.sample(step), LAYERS))
    assert torch.equal(gate.harden(), plain.harden())


@pytest.mark.parametrize("make", CONCRETE)
@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(-30, 30, width=32), min_size=HEADS, max_size=HEADS))
def test_without_a_number_to_keep_the_open_heads_stay(make: MakeConcrete, weights: list[float]) -> None:
    gate = make(LAYERS, None, 100, 0, cooldown=0.4)
    _put(gate, weights)
    assert gate.harden().tolist() == [weight > 0 for weight in weights]
    assert torch.equal(gate.scale() != 0, gate.harden())
    assert gate.harden().sum() == gate.counts()["open"]
    assert gate.choice
    assert gate.penalty(39) > gate.penalty(40) == 0
    assert torch.equal(gate.sample(40), gate.scale())


def test_hard_concrete_has_mass_at_both_ends() -> None:
    gate = HardConcreteGate(LAYERS, 4, 30, 0)
    _put(gate, [2.0] * HEADS)
    n = 10**6
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    drawn = gate.draw(uniform[:, None])[:, 0]
    assert (drawn == 0).double().mean().item() == pytest.approx(0.057405, abs=2e-6)
    assert (drawn == 1).double().mean().item() == pytest.approx(0.768792, abs=2e-6)
    assert (drawn > 0).double().mean().item() == pytest.approx(0.942595, abs=2e-6)
    assert gate.open().tolist() == pytest.approx([0.942595] * HEADS, abs=5e-7)


def test_bin_concrete_starts_open() -> None:
    gate = BinConcreteGate(LAYERS, 4, 30, 0, output_scaling=False)
    assert gate.weight.tolist() == [2.0] * HEADS
    n = 10**5
    drawn = gate.draw(((torch.arange(n, dtype=torch.float64) + 0.5) / n)[:, None])[:, 0]
    assert drawn.detach().mean().item() == pytest.approx(0.8808, abs=1e-5)
    assert gate.counts() == {"open": 9.0, "expected": pytest.approx(9 * 0.942595, abs=1e-5)}


@pytest.mark.parametrize("step", [0, 7])
@pytest.mark.parametrize(
    "gate", [dsp(4, tau_ini=2.0, tau_end=0.5), HardConcreteGate(LAYERS, 4, 30, 0)], ids=["dsp", "hard-concrete"]
)
def test_gradients_of_samples_are_those_of_finite_differences(gate: base.RankedGate, step: int) -> None:
    toward = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    found = _gradient(gate, gate.sample(step) @ toward)
    assert any(found)
    assert _slopes(gate, lambda: gate.sample(step) @ toward) == pytest.approx(found, abs=1e-6)


@pytest.mark.parametrize("make", CONCRETE)
@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.floats(-5, 5), min_size=HEADS, max_size=HEADS))
def test_the_penalty_closes_heads(make: MakeConcrete, weights: list[float]) -> None:
    gate = make(LAYERS, 4, 100, 0, penalty=0.5, penalty_warmup=0.1, cooldown=0.4)
    _put(gate, weights)
    found = _gradient(gate, gate.penalty(10))
    assert min(found) > 0
    assert _slopes(gate, lambda: gate.penalty(10)) == pytest.approx(found, abs=1e-6)


@pytest.mark.parametrize("make", CONCRETE)
def test_the_penalty_rises_then_stops_with_the_freeze(make: MakeConcrete) -> None:
    gate = make(LAYERS, 4, 100, 0, penalty=0.5, penalty_warmup=0.1, cooldown=0.4)
    whole = 0.5 * gate.counts()["expected"]
    shares = [gate.penalty(step).item() / whole for step in (0, 5, 10, 39, 40, 99)]
    assert shares == pytest.approx([0, 0.5, 1, 1, 0, 0])
    assert [gate.is_settled(step) for step in (0, 39, 40, 100)] == [False, False, True, True]
    assert [gate.learning_rate_at(step) for step in (0, 20, 40, 99)] == [1.0, 0.5, 0.0, 0.0]
    assert torch.equal(gate.sample(40), gate.scale())
    assert not torch.equal(gate.sample(39), gate.scale())


@pytest.mark.parametrize("make", CONCRETE)
def test_a_penalty_without_warm_up_is_whole_from_the_start(make: MakeConcrete) -> None:
    gate = make(LAYERS, 4, 100, 0, penalty=0.5, penalty_warmup=0.0)
    assert gate.penalty(0).item() == pytest.approx(0.5 * gate.counts()["expected"])


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(-3, 3) | st.sampled_from([0.0, 1.0]), min_size=HEADS, max_size=HEADS),
    keep=st.integers(0, HEADS),
)
def test_as_few_heads_as_possible_are_moved_to_keep_k(weights: list[float], keep: int) -> None:
    gate = HardConcreteGate(LAYERS, keep, 30, 0)
    _put(gate, weights)
    is_open, kept = gate.weight > 0, gate.harden()
    moved = kept != is_open
    assert moved.sum() == abs(int(is_open.sum()) - keep)
    if kept.any() and not kept.all():
        assert gate.weight[kept].min() >= gate.weight[~kept].max()


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


@pytest.mark.parametrize("name", GATES)
def test_every_gate_refuses_what_none_can_do(name: str) -> None:
    for keep, options in ((10, {}), (-1, {}), (2, {"gate_learning_rate": 0.0}), (2, {"gate_max_grad_norm": -1.0})):
        with pytest.raises(UsageError, match=r"the model has 9 heads|must be above 0"):
            GATES[name](LAYERS, keep, 30, 0, **options)


@pytest.mark.parametrize("make", CONCRETE)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty": -0.1}, "penalty -0.1: would reward open heads; give a number from 0 up"),
        ({"penalty_warmup": 2.0}, "penalty_warmup 2.0: a share of the steps"),
        ({"cooldown": -1.0}, "cooldown -1.0: a share of the steps"),
        ({"beta": 0.0}, "beta 0.0: a temperature"),
    ],
)
def test_concrete_gates_refuse_options_out_of_range(
    make: MakeConcrete, options: dict[str, float], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make(LAYERS, 4, 30, 0, **options)


@pytest.mark.parametrize("ends", [{"gamma": 0.0}, {"zeta": 1.0}])
def test_the_stretch_holds_zero_and_one(ends: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="0 and 1 must lie between them"):
        HardConcreteGate(LAYERS, 4, 30, 0, **ends)


def test_counts_add_up_over_pools() -> None:
    pools = ["bidirectional", "causal", "bidirectional"]
    gate = PooledGate(lambda layers, count, seed: BinConcreteGate(layers, count, 30, seed), LAYERS, pools, 4, 0)
    assert gate.counts() == pytest.approx(BinConcreteGate(LAYERS, 4, 30, 0).counts())
    assert gate.penalty(9).item() == pytest.approx(BinConcreteGate(LAYERS, 4, 30, 0).penalty(9).item())


def test_pools_without_a_number_keep_what_is_open() -> None:
    pools = ["bidirectional", "causal", "bidirectional"]
    gate = PooledGate(lambda layers, count, seed: HardConcreteGate(layers, count, 30, seed), LAYERS, pools, None, 0)
    with torch.no_grad():
        for weight, values in zip(gate.parameters(), ([1.0, -1, 1, -1, 1], [-1.0, -1, -1, 1]), strict=True):
            weight.copy_(torch.tensor(values))
    assert gate.harden().tolist() == [True, False, True, False, False, False, True, False, True]


@pytest.mark.parametrize("keep", range(HEADS + 1))
def test_pools_keep_their_share_each(keep: int) -> None:
    # Sites 0 and 2 are encoders of 3 + 2 heads, site 1 is a decoder of 4.
    pools = ["bidirectional", "causal", "bidirectional"]
    gate = PooledGate(lambda layers, count, seed: DspGate(layers, count, 30, seed), LAYERS, pools, keep, 0)
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
    pooled = PooledGate(
        lambda layers, count, seed: DspGate(layers, count, 30, seed), LAYERS, ["bidirectional"] * 3, 4, 5
    )
    assert torch.equal(pooled.sample(3), DspGate(LAYERS, 4, 30, 5).sample(3))


def _put(gate: base.RankedGate, weights: list[float]) -> None:
    with torch.no_grad():
        gate.weight.copy_(torch.tensor(weights))


def _gradient(gate: base.RankedGate, of: torch.Tensor) -> list[float]:
    (found,) = torch.autograd.grad(of, gate.weight)
    return list(found.tolist())


def _slopes(gate: base.RankedGate, of: Callable[[], torch.Tensor], step: float = 1e-6) -> list[float]:
    """The gradient of `of` in the gate's weights by central differences."""
    slopes = []
    with torch.no_grad():
        for head in range(gate.heads):
            values = []
            for shift in (step, -2 * step):
                gate.weight[head] += shift
                values.append(of().item())
            gate.weight[head] += step
            slopes.append((values[0] - values[1]) / (2 * step))
    return slopes
