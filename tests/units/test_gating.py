"""A gated model multiplies each head by its gate and is restored afterwards; a plan must fit its model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.units import Attention, Site, check_plan, find_sites, gated, keep_all, keep_only
from graph_passes import Plan
from tests.faults import fails_with
from tests.random_plans import random_plan
from tests.units.families import families
from tests.units.states import are_equal, forward, snapshot
from tests.zoo import FAMILIES


@pytest.mark.parametrize("attention", [None, "eager", "sdpa"])
@pytest.mark.parametrize("name", families(FAMILIES, ("bert", "llama", "all_attention")))
def test_gates_of_one_change_no_bit(name: str, attention: Attention | None) -> None:
    model, inputs = FAMILIES[name](0)
    plan = keep_all(find_sites(model, inputs))
    ungated = copy.deepcopy(model)
    if attention is not None:
        ungated.set_attn_implementation(attention)
    before = snapshot(model)
    with gated(model, plan, attention=attention):
        output = forward(model, inputs)
    assert torch.equal(output, forward(ungated, inputs))
    assert are_equal(before, snapshot(model))


@pytest.mark.parametrize("name", families(FAMILIES, ("bert", "llama", "t5")))
def test_eager_and_sdpa_give_equal_gated_outputs(name: str) -> None:
    model, inputs = FAMILIES[name](0)
    plan = random_plan(find_sites(model, inputs), np.random.default_rng(5))
    outputs = []
    for attention in ("eager", "sdpa"):
        with gated(model, plan, attention=attention):
            outputs.append(forward(model, inputs))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5 * float(outputs[0].abs().max()))
    assert not torch.allclose(outputs[0], forward(model, inputs), atol=1e-2)


PROJECTIONS = {
    "bert": ("self", "output.dense", 1),
    "gpt2": ("attn", "attn.c_proj", 0),
    "llama": ("self_attn", "self_attn.o_proj", 1),
    "t5": ("Attention", "Attention.o", 1),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_gate_scales_a_slice_of_the_output_projection(name: str) -> None:
    model, inputs = FAMILIES[name](0)
    plan = random_plan(find_sites(model, inputs), np.random.default_rng(1))
    with gated(model, plan, attention="eager"):
        output = forward(model, inputs)
    attention, projection, axis = PROJECTIONS[name]
    model.set_attn_implementation("eager")
    for site in plan.sites:
        weight = model.get_parameter(f"{site.name.removesuffix(attention)}{projection}.weight")
        gate = torch.tensor(site.gate).repeat_interleave(site.head_dim)
        weight.data.mul_(gate if axis == 1 else gate[:, None])
    torch.testing.assert_close(output, forward(model, inputs), rtol=1e-4, atol=1e-5)


def test_gates_have_the_precision_of_the_model() -> None:
    model, inputs = FAMILIES["llama"](0)
    model.bfloat16()
    expected = forward(model, inputs)
    with gated(model, keep_all(find_sites(model, inputs))):
        assert {value.dtype for name, value in model.named_buffers() if name.endswith("head_gate")} == {torch.bfloat16}
        assert torch.equal(forward(model, inputs), expected)


def test_a_plan_keeps_the_named_heads_with_their_scales() -> None:
    sites = [Site("first", "causal", 4, 2, 8), Site("second", "cross", 2, 2, 8)]
    plan = keep_only(sites, {("first", 3): 0.5, ("first", 1): 2.0})
    assert [(site.name, site.kind, site.kept, site.scale) for site in plan.sites] == [
        ("first", "causal", (1, 3), (2.0, 0.5)),
        ("second", "cross", (), ()),
    ]
    assert [(site.kept, site.scale) for site in keep_all(sites).sites] == [
        ((0, 1, 2, 3), (1.0,) * 4),
        ((0, 1), (1.0,) * 2),
    ]
    for head in (("first", 4), ("third", 0)):
        with pytest.raises(ValueError, match="no such head"):
            keep_only(sites, {head: 1.0})


def _interrupted(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    model(**inputs)
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_everything_is_restored_after_an_error(name: str) -> None:
    model, inputs = FAMILIES[name](0)
    plan = random_plan(find_sites(model, inputs), np.random.default_rng(0))
    before = snapshot(model.train())
    with pytest.raises(KeyboardInterrupt), gated(model, plan, attention="eager"):
        _interrupted(model, inputs)
    assert are_equal(before, snapshot(model))


@dataclass(frozen=True)
class Case:
    """A model with its inputs, its sites and the plan that keeps every head."""

    model: PreTrainedModel
    inputs: dict[str, Tensor]
    sites: list[Site]
    plan: Plan

    @property
    def first(self) -> str:
        """Name of the first site."""
        return self.sites[0].name

    def changed(self, **fields: Any) -> Plan:
        """The plan with other fields of the first site, of which it keeps head 0 only."""
        site = replace(self.plan.sites[0], **{"kept": (0,), "scale": (1.0,), **fields})
        return self.plan.model_copy(update={"groups": (site, *self.plan.sites[1:])})

    @property
    def shortened(self) -> Plan:
        """The plan without its first site."""
        return self.plan.model_copy(update={"groups": self.plan.sites[1:]})


@pytest.fixture(scope="module")
def case() -> Case:
    model, inputs = FAMILIES["bert"](0)
    sites = find_sites(model, inputs)
    return Case(model, inputs, sites, keep_all(sites))


def test_a_plan_of_the_model_is_accepted(case: Case) -> None:
    check_plan(case.plan, case.sites)


@pytest.mark.parametrize(
    ("fields", "field", "planned", "actual"),
    [
        ({"heads": 6, "kv_heads": 6}, "heads", 6, 4),
        ({"kv_heads": 2}, "kv_heads", 2, 4),
        ({"head_dim": 16}, "head_dim", 16, 8),
        ({"kind": "causal"}, "kind", "causal", "bidirectional"),
    ],
)
def test_a_site_of_another_size_is_refused(
    fields: dict[str, Any], field: str, planned: Any, actual: Any, case: Case
) -> None:
    details = {"site": case.first, "field": field, "planned": planned, "actual": actual}
    with fails_with(ErrorCode.PLAN_MISMATCH, InputError, **details):
        check_plan(case.changed(**fields), case.sites)


def test_superfluous_and_missing_sites_are_refused(case: Case) -> None:
    with fails_with(ErrorCode.PLAN_MISMATCH, InputError, site="nowhere"):
        check_plan(case.changed(name="nowhere"), case.sites)
    with fails_with(ErrorCode.PLAN_MISMATCH, InputError, site=case.first):
        check_plan(case.shortened, case.sites)


def test_a_context_refuses_what_it_cannot_gate(case: Case) -> None:
    before = snapshot(case.model)
    with (
        fails_with(ErrorCode.PLAN_MISMATCH, InputError, site="nowhere"),
        gated(case.model, case.changed(name="nowhere")),
    ):
        pass
    with (
        fails_with(ErrorCode.CONTRADICTION, InputError, site=case.first),
        gated(case.model, case.plan),
        gated(case.model, case.plan),
    ):
        pass
    with fails_with(ErrorCode.PLAN_MISMATCH, InputError, site=case.first), gated(case.model, case.shortened):
        forward(case.model, case.inputs)
    sizes = {"site": case.first, "planned": (1, 8), "actual": (4, 8)}
    with (
        fails_with(ErrorCode.PLAN_MISMATCH, InputError, **sizes),
        gated(case.model, case.changed(heads=1, kv_heads=1)),
    ):
        forward(case.model, case.inputs)
    assert are_equal(before, snapshot(case.model))


def test_messages(case: Case) -> None:
    with pytest.raises(InputError) as error:
        check_plan(case.changed(heads=6, kv_heads=6), case.sites, source="plan.json")
    assert str(error.value) == (
        f"plan.json: {case.first}: heads is 6 in the plan, 4 in the model; use a plan that was learned on this model"
    )
    with pytest.raises(InputError) as error:
        check_plan(case.changed(name="nowhere"), case.sites)
    first, second, third = (site.name for site in case.sites)
    assert str(error.value) == (
        f"plan: the model has no attention site nowhere, its sites are {first}, {second}, {third}; use a plan that was"
        " learned on this model"
    )
