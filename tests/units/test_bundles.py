"""Bundles of units: any subset of them is a plan of the group, and gates are spread over their units."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compressor.units import Bundles, PrunableGroup, Site

GROUPS = {
    "neurons": PrunableGroup("down", "neurons", 64, 1, 8, "down"),
    "neurons with some left over": PrunableGroup("down", "neurons", 68, 1, 8, "down"),
    "shared heads": PrunableGroup("attention", "heads", 8, 4, 4, "out", Site("attention", "causal", 8, 2, 4), bundle=4),
}


def shuffled(group: PrunableGroup, seed: int) -> Bundles:
    return Bundles(group, tuple(np.random.default_rng(seed).permutation(group.units).tolist()))


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("seed", range(5))
def test_any_subset_of_bundles_keeps_a_number_of_units_of_the_group(name: str, seed: int) -> None:
    members = shuffled(GROUPS[name], seed)
    gates = torch.from_numpy(np.random.default_rng(seed).integers(0, 2, members.count)).double()
    for subset in (gates, torch.zeros_like(gates), torch.ones_like(gates)):
        plan = members.plan(subset)
        assert len(plan.kept) in members.group.counts
        assert len(plan.kept) // members.group.step == int(subset.sum())
        assert torch.equal(members.spread(subset), torch.tensor(plan.gate, dtype=torch.float64))


def test_a_bundle_is_a_run_of_the_order() -> None:
    order = (*range(1, 64, 2), *range(0, 64, 2))
    members = Bundles(GROUPS["neurons"], order)
    gates = torch.zeros(8)
    gates[1] = 0.5
    plan = members.plan(gates)
    assert plan.kept == tuple(range(17, 33, 2))
    assert set(plan.scale) == {0.5}


def test_units_that_are_left_over_have_the_least_gate() -> None:
    members = Bundles(GROUPS["neurons with some left over"], tuple(range(68)))
    gates = torch.linspace(0.2, 0.9, 8, requires_grad=True)
    assert members.spread(gates)[64:].tolist() == pytest.approx([0.2] * 4)
    members.spread(gates)[64:].sum().backward()
    assert gates.grad is not None
    assert gates.grad.tolist() == [4, 0, 0, 0, 0, 0, 0, 0]


def test_every_head_of_a_site_has_a_gate() -> None:
    members = Bundles.of_site(Site("attention", "causal", 8, 2, 4))
    assert members.count == 8
    assert members.spread(torch.arange(8.0)).tolist() == list(range(8))
