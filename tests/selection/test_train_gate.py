"""Gates over heads and neurons within a budget: met for any seed, reproducible, and the law of gated models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.config.methods import METHODS
from compressor.selection.gates.capacity import UnitBudget
from compressor.selection.gates.dsp import DspGate
from compressor.selection.train_gate import UnitPool
from compressor.training.gated_model import attach_gate
from compressor.units import gated, keep_all
from tests.language import EndOfPowerError
from tests.selection import pools, tiny
from tests.selection.tiny import GATE_METHODS
from tests.training.runs import stop_after

INPUTS = {"input_ids": torch.tensor([[3, 14, 7, 2, 19], [5, 1, 12, 0, 0]])}


@pytest.mark.parametrize(
    ("share", "seed", "method"),
    [
        pytest.param(share, seed, method, marks=() if seed == 1 and method in ("dsp", "ste") else pytest.mark.zoo)
        for share, seed in ((0.3, 1), (0.62, 2))
        for method in GATE_METHODS
    ],
)
def test_a_budget_is_met_as_closely_as_bundles_allow(method: str, share: float, seed: int, tmp_path: Path) -> None:
    learned = pools.learn(tmp_path, method, share, seed)
    plan, total = learned.plan, 8 * pools.HEAD + 16 * pools.BUNDLE
    assert share * total - min(pools.HEAD, pools.BUNDLE) < pools.cost(plan) <= share * total
    assert plan.method == method
    assert plan.data == "sha256:rows"
    assert learned.trained == METHODS[method].trains_model
    groups = {group.name: group for group in pools.groups_of(pools.classifier())}
    assert [group.name for group in plan.groups] == list(groups)
    assert all(len(group.kept) in groups[group.name].counts for group in plan.groups)


def test_a_budget_of_everything_and_of_nothing(tmp_path: Path) -> None:
    whole, empty = (pools.learn(tmp_path / str(share), share=share, steps=2).plan for share in (1.0, 0.0))
    assert (whole.heads_kept, whole.neurons_kept) == (whole.heads, whole.neurons)
    assert (empty.heads_kept, empty.neurons_kept) == (0, 0)


@pytest.mark.parametrize(("types", "unchanged"), [(("heads",), "neurons"), (("neurons",), "heads")])
def test_units_that_do_not_compete_stay(types: tuple[str, ...], unchanged: str, tmp_path: Path) -> None:
    plan = pools.learn(tmp_path, types=types, steps=2).plan
    assert getattr(plan, f"{types[0]}_kept") < getattr(plan, types[0])
    assert getattr(plan, f"{unchanged}_kept") == getattr(plan, unchanged)


@pytest.mark.parametrize("method", ["dsp", pytest.param("bin-concrete", marks=pytest.mark.zoo)])
def test_a_resumed_run_equals_an_uninterrupted_one(method: str, tmp_path: Path) -> None:
    models = pools.classifier(), pools.classifier()
    whole = pools.learn(tmp_path / "whole", method, model=models[0])
    with pytest.raises(EndOfPowerError):
        pools.learn(tmp_path / "halved", method, on_progress=stop_after(5))
    resumed = pools.learn(tmp_path / "halved", method, model=models[1])
    assert resumed.plan == whole.plan
    assert resumed.curves == whole.curves
    assert tiny.have_same_weights(*models)


def test_the_budget_is_part_of_what_is_resumed(tmp_path: Path) -> None:
    pools.learn(tmp_path, share=0.3, steps=2)
    fresh = pools.learn(tmp_path / "other", share=0.6, steps=2)
    assert pools.learn(tmp_path, share=0.6, steps=2).plan == fresh.plan


def test_gates_at_one_leave_the_model_as_it_is() -> None:
    model = pools.classifier().eval()
    pool = pools.make_pool(model, 1.0)
    gate = DspGate(pool.layers, pool.budget, 10, 0)
    with torch.no_grad():
        plain = model(**INPUTS).logits
        with attach_gate(model, gate, pool.bundles, lambda: 0):
            assert torch.equal(model(**INPUTS).logits, plain)
        assert torch.equal(model(**INPUTS).logits, plain)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("method", ["dsp", "bin-concrete"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.zoo) for seed in (1, 2))])
def test_a_model_with_its_gate_is_the_gated_model_of_the_plan(method: str, seed: int) -> None:
    model = pools.classifier().eval()
    pool = pools.make_pool(model, 0.5)
    gate = METHODS[method].load()(pool.layers, pool.budget, 10, seed)
    with torch.no_grad():
        gate.weight.copy_(torch.from_numpy(np.random.default_rng(seed).normal(size=gate.units)))
        parts = gate.scale().split(pool.layers)
        plans = [member.plan(part) for member, part in zip(pool.bundles, parts, strict=True)]
        with attach_gate(model, gate, pool.bundles, lambda: 0):
            outputs = model(**INPUTS).logits
        with gated(model, keep_all(pools.groups_of(model)).replace_groups(plans)):
            assert torch.allclose(model(**INPUTS).logits, outputs, atol=1e-6)


def test_neurons_are_bundled_by_importance() -> None:
    """Some neurons are not read; they come last."""
    model = pools.classifier()
    important = torch.arange(0, pools.NEURONS, 4)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.shape == (16, pools.NEURONS):
                weight.mul_(torch.arange(pools.NEURONS) % 4 == 0)
    for member in pools.make_pool(model, 0.5).bundles:
        if member.group.type == "neurons":
            assert set(member.order[: len(important)]) == set(important.tolist())
        else:
            assert member.order == tuple(range(4))


def test_a_pool_is_read_as_it_was_written() -> None:
    model = pools.classifier()
    pool = pools.make_pool(model, 0.4)
    read = UnitPool.from_json(json.loads(json.dumps(pool.to_json())), pools.groups_of(model))
    assert read == pool
    assert read.digest == pool.digest
    assert isinstance(read.budget, UnitBudget)
