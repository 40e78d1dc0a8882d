"""Groups: neurons are recognized in every family, gated like heads, and the model is left unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.units import Bundles, PrunableGroup, Site, expert_weights, find_groups, find_sites, gated, keep_all
from graph_passes import NeuronPlan, Plan
from tests.faults import fails_with
from tests.projection_models import SIZES
from tests.projection_zoo import FAMILIES as PROJECTIONS
from tests.unchanged import unchanged
from tests.units.families import families
from tests.zoo import FAMILIES, GROUPED, text

NEURONS = {
    "bert": ("bert.encoder.layer.0.output.dense", 44, 3),
    "gpt2": ("transformer.h.0.mlp.c_proj", 128, 3),
    "llama": ("model.layers.0.mlp.down_proj", 44, 3),
    "t5": ("encoder.block.0.layer.1.DenseReluDense.wo", 44, 4),
    "modernbert": ("model.layers.0.mlp.Wo", 44, 3),
}
"""Family -> the first linear that reads neurons, their number, and the number of feed-forwards."""
CASES = [name if name in NEURONS else pytest.param(name, marks=pytest.mark.zoo) for name in FAMILIES]
GROUPS = {
    "neurons": PrunableGroup("down", "neurons", 64, 1, 8, "down"),
    "neurons with some left over": PrunableGroup("down", "neurons", 68, 1, 8, "down"),
    "shared heads": PrunableGroup("attention", "heads", 8, 4, 4, "out", Site("attention", "causal", 8, 2, 4), bundle=4),
}


@pytest.mark.parametrize("family", CASES)
def test_groups_of_a_family(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    with unchanged(model):
        groups = find_groups(model, inputs)
    sites = [group.site for group in groups if group.site is not None]
    assert sites == find_sites(model, inputs)
    assert not expert_weights(model, groups)
    assert all(group.linear is not None for group in groups)
    neurons = [group for group in groups if group.type == "neurons"]
    if family in NEURONS:
        first = neurons[0]
        assert (first.name, first.units, len(neurons)) == NEURONS[family]
    assert bool(neurons) == (family != "all_attention")
    for group in groups:
        assert group.counts[0] == 0
        assert group.counts[-1] == group.units
        assert len(set(group.counts)) == len(group.counts)


def test_experts_in_tensors_of_three_axes_are_named() -> None:
    sizes = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    groups = find_groups(model, text())
    assert {group.type for group in groups} == {"heads"}
    assert expert_weights(model, groups) == tuple(f"model.layers.{layer}.mlp.experts" for layer in (0, 1))


@pytest.mark.parametrize("family", ["funnel", "wavlm"])
def test_attentions_and_convolutions_are_no_experts(family: str) -> None:
    model, inputs = PROJECTIONS[family].model(), PROJECTIONS[family].inputs(2, 8)
    assert any(weight.dim() == 3 for weight in model.parameters())
    assert not expert_weights(model, find_groups(model, inputs))


def test_heads_that_share_keys_are_kept_together() -> None:
    model, inputs = FAMILIES["llama"](0)
    heads = next(group for group in find_groups(model, inputs) if group.type == "heads")
    assert (heads.units, heads.bundle, heads.bundles, heads.counts) == (4, 2, 2, (0, 2, 4))
    assert [heads.dropped_bundles(count) for count in heads.counts] == [2, 1, 0]


def test_query_heads_of_each_key_value_head_are_a_part() -> None:
    model, inputs = GROUPED(0)
    by_kv, by_query = (find_groups(model, inputs, group_by=group_by)[0] for group_by in ("kv", "query"))
    assert (by_kv.bundle, by_kv.parts, by_kv.counts) == (4, 1, (0, 4, 8))
    assert (by_query.bundle, by_query.parts, by_query.counts) == (1, 2, (0, 2, 4, 6, 8))


@pytest.mark.parametrize("family", families(("bert", "t5"), ("bert",)))
def test_heads_with_keys_of_their_own_are_grouped_in_one_way(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    assert find_groups(model, inputs, group_by="query") == find_groups(model, inputs, group_by="kv")


def test_the_first_units_are_those_of_every_part() -> None:
    group = PrunableGroup("group", "heads", 8, 4, 2, "linear", parts=2)
    assert [group.first(count) for count in group.counts] == [
        (),
        (0, 4),
        (0, 1, 4, 5),
        (0, 1, 2, 4, 5, 6),
        tuple(range(8)),
    ]
    assert group.first(3) == (0, 1, 4)
    assert PrunableGroup("group", "heads", 8, 4, 1, "linear").first(3) == (0, 1, 2)


class MixingLinear(nn.Module):
    """A norm over all neurons before the linear that reads them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(linear.in_features), linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(self.norm(hidden))
        return output


def test_neurons_that_a_norm_mixes_are_no_group() -> None:
    model, inputs = FAMILIES["bert"](0)
    output: Any = model.get_submodule("bert.encoder.layer.1.output")
    output.dense = MixingLinear(output.dense)
    names = {group.name for group in find_groups(model, inputs) if group.type == "neurons"}
    assert names == {"bert.encoder.layer.0.output.dense", "bert.encoder.layer.2.output.dense"}


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_gated_neurons_multiply_the_inputs_of_their_linear(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    groups = find_groups(model, inputs)
    group = next(group for group in groups if group.type == "neurons")
    kept = tuple(range(1, group.units, 3))
    plan = keep_all(groups).replace_groups([NeuronPlan(group.name, group.units, kept, (0.5,) * len(kept))])
    with torch.no_grad():
        with unchanged(model), gated(model, plan):
            output = model(**inputs).logits
        linear: Any = model.get_submodule(group.name)
        weight = linear.weight if family == "gpt2" else linear.weight.T
        weight *= torch.tensor(plan[group.name].gate)[:, None]
        assert torch.allclose(model(**inputs).logits, output, atol=1e-5)


@pytest.mark.parametrize("returns", ["a tensor", "as many rows as it predicts"])
def test_groups_of_models_with_unusual_outputs(returns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = FAMILIES["bert"](0)[0], text(16, 8)
    output: Any = model.get_submodule("bert.encoder.layer.1.output")
    output.dense = MixingLinear(output.dense)  # its neurons change the logits while they are dropped
    expected = find_groups(model, inputs)
    forward = model.forward

    def changed(**inputs: torch.Tensor) -> Any:
        logits = forward(**inputs).logits
        # About half of 16 rows, and others of them after any change of the logits.
        return logits if returns == "a tensor" else {"logits": logits[(logits[:, 0] * 1e4).long() % 2 == 0]}

    monkeypatch.setattr(model, "forward", changed)
    assert find_groups(model, inputs) == expected


def test_a_plan_of_other_neurons_is_refused() -> None:
    model, inputs = FAMILIES["bert"](0)
    sites = keep_all(find_sites(model, inputs)).groups
    for name, units in (("bert.encoder.layer.0.output.dense", 43), ("bert.embeddings", 44), ("bert.nothing", 44)):
        plan = Plan(groups=(*sites, NeuronPlan(name, units, (0,))))
        with pytest.raises(InputError) as error, gated(model, plan):
            pass
        assert (error.value.code, error.value.details["site"]) == (ErrorCode.PLAN_MISMATCH, name)


def test_an_unknown_way_to_group_heads_is_refused() -> None:
    model, inputs = FAMILIES["bert"](0)
    group_by: Any = "head"
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="group_by"):
        find_groups(model, inputs, group_by=group_by)


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
        assert len(plan.kept) // members.group.multiple == int(subset.sum())
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
