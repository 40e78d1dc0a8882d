"""Several pools of heads that share one number to keep."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.selection.gates import Gate, PerKindGate
from compressor.selection.gates.base import divide_heads
from compressor.selection.gates.dsp import DspGate
from tests.selection.gates.weights import HEADS, LAYERS, make_gate

POOLS = ["bidirectional", "causal", "bidirectional"]
"""Sites 0 and 2 have 3 + 2 heads, site 1 has 4."""


def pooled(method: str, pools: Sequence[str], keep: int | None, seed: int = 0) -> PerKindGate:
    """A gate with one gate of a method for each pool."""

    def make(layers: Sequence[int], count: int | None, seed: int) -> Gate:
        return make_gate(method, count, layers=layers, seed=seed)

    return PerKindGate(make, LAYERS, pools, keep, seed)


def test_counts_and_penalties_add_up_over_pools() -> None:
    gate, single_gate = pooled("bin-concrete", POOLS, 4), make_gate("bin-concrete", 4)
    assert gate.counts() == pytest.approx(single_gate.counts())
    assert gate.penalty(9).item() == pytest.approx(single_gate.penalty(9).item())


def test_pools_without_a_number_keep_the_open_heads() -> None:
    gate = pooled("hard-concrete", POOLS, None)
    with torch.no_grad():
        for weight, values in zip(gate.parameters(), ([1.0, -1, 1, -1, 1], [-1.0, -1, -1, 1]), strict=True):
            weight.copy_(torch.tensor(values))
    assert gate.harden().tolist() == [True, False, True, False, False, False, True, False, True]


@pytest.mark.parametrize("keep", range(HEADS + 1))
def test_each_pool_keeps_its_share(keep: int) -> None:
    gate = pooled("dsp", POOLS, keep)
    with torch.no_grad():
        for weight, values in zip(gate.parameters(), ([0.1, 0.2, 0.3, 0.4, 0.5], [9.0, 8.0, 7.0, 6.0]), strict=True):
            weight.copy_(torch.tensor(values))
    mask = gate.harden()
    assert mask.sum() == keep
    bidirectional, causal = mask[[0, 1, 2, 7, 8]], mask[3:7]
    assert [int(bidirectional.sum()), int(causal.sum())] == divide_heads(keep, [5, 4])
    assert bidirectional.tolist() == sorted(bidirectional.tolist())  # weights rise with the number of the head
    assert causal.tolist() == sorted(causal.tolist(), reverse=True)
    for step in (0, 29):
        assert gate.sample(step)[3:7].sum().item() == pytest.approx(divide_heads(keep, [5, 4])[1])
    assert torch.equal(gate.scale() != 0, mask)


def test_heads_are_divided_by_largest_remainder() -> None:
    assert divide_heads(5, [6, 6, 6]) == [2, 2, 1]
    assert divide_heads(7, [10, 4]) == [5, 2]
    assert divide_heads(0, [3, 4]) == [0, 0]
    assert divide_heads(7, [3, 4]) == [3, 4]


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), share=st.floats(0, 1))
def test_no_pool_keeps_more_heads_than_it_has(sizes: list[int], share: float) -> None:
    keep = round(share * sum(sizes))
    counts = divide_heads(keep, sizes)
    assert sum(counts) == keep
    assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))


def test_a_single_pool_equals_the_gate_without_pools() -> None:
    gate = pooled("dsp", ["bidirectional"] * 3, 4, seed=5)
    assert torch.equal(gate.sample(3), DspGate(LAYERS, 4, 30, 5).sample(3))


def test_seeds_depend_on_the_order_of_pools_and_not_on_their_names() -> None:
    renamed = ["decoder", "encoder", "decoder"]
    gates = [pooled("dsp", pools, 4, seed=5) for pools in (POOLS, renamed)]
    assert torch.equal(gates[0].sample(3), gates[1].sample(3))
