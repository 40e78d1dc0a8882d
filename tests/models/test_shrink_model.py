"""A model without its dropped heads computes what the gated model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import ErrorCode
from compressor.models import AllAttentionForCausalLM, SegmentForCausalLM, pruned
from compressor.units import Site, find_groups, find_sites, gated, keep_all
from graph_passes import BlockMask
from tests.faults import fails_with
from tests.models.reference import read_in_segments
from tests.random_plans import random_plan
from tests.targets.segment_models import FAMILIES, SIZES, head_parameters, plan_of, segment_model, token_ids

MODELS = {family: segment_model(family, num_hidden_layers=3) for family in FAMILIES}


def sites_of(model: SegmentForCausalLM) -> list[Site]:
    return find_sites(model, {"input_ids": token_ids(2, 5)})


def parameters(model: SegmentForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_a_pruned_model_equals_the_gated_one(family: str, seed: int) -> None:
    model = MODELS[family]
    plan = random_plan(sites_of(model), np.random.default_rng(seed))
    smaller = pruned(model, plan)
    assert smaller.config.layer_heads == [list(site.kept) for site in plan.sites]
    norms = 2 * SIZES["hidden_size"] * sum(not site.kept for site in plan.sites)
    dropped = plan.heads - plan.heads_kept
    assert parameters(model) - parameters(smaller) == dropped * head_parameters(model) + norms
    text = token_ids(2, 9, seed)
    with torch.no_grad():
        with gated(model, plan):
            expected, memories = read_in_segments(model, text, 3)
        logits, smaller_memories = read_in_segments(smaller, text, 3)
    for tensor, reference in zip((logits, *smaller_memories), (expected, *memories), strict=True):
        torch.testing.assert_close(tensor, reference, rtol=1e-4, atol=1e-4 * reference.abs().max().item())


def test_pruning_again_keeps_the_original_ids(tmp_path: Path) -> None:
    model: Any = MODELS["all_attention"]
    first = pruned(model, plan_of(sites_of(model), [(0, 2, 3), (), (1, 3)]))
    second: Any = pruned(first, plan_of(sites_of(first), [(1, 2), (1,)]))
    assert second.config.layer_heads == [[2, 3], [], [3]]
    directly: Any = pruned(model, plan_of(sites_of(model), [(2, 3), (), (3,)]))
    torch.testing.assert_close(second(token_ids(2, 5)).logits, directly(token_ids(2, 5)).logits, rtol=0, atol=0)
    assert second.lm_head.weight is second.model.embed_tokens.weight
    assert second.lm_head.weight is not model.lm_head.weight
    second.save_pretrained(tmp_path)
    loaded: Any = AllAttentionForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(token_ids(2, 5)).logits, directly(token_ids(2, 5)).logits, rtol=0, atol=0)


def test_a_plan_of_another_model_is_refused() -> None:
    two_heads = segment_model("transformer_xl", num_hidden_layers=3, num_attention_heads=2)
    with fails_with(ErrorCode.PLAN_MISMATCH, site="model.layers.0.attention", field="heads", planned=2, actual=4):
        pruned(MODELS["all_attention"], keep_all(sites_of(two_heads)))


def test_a_plan_with_masks_is_refused() -> None:
    model = MODELS["all_attention"]
    plan = keep_all(sites_of(model))
    site = plan.sites[0]
    mask = BlockMask(np.ones((site.heads, 2, 2), dtype=bool), 8)
    with fails_with(ErrorCode.INVALID_VALUE, field="plan", sites=(site.name,)):
        pruned(model, plan.masked({site.name: mask}))


def test_a_pruned_model_trains_what_the_model_trains() -> None:
    model = segment_model(FAMILIES[0], num_hidden_layers=2)
    model.model.embed_tokens.weight.requires_grad_(False)
    smaller = pruned(model, random_plan(sites_of(model), np.random.default_rng(0)))
    trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    assert {name: weight.requires_grad for name, weight in smaller.named_parameters() if name in trained}.items() <= (
        trained.items()
    )


def test_a_plan_that_drops_neurons_is_refused() -> None:
    model = segment_model("transformer_xl")
    groups = find_groups(model, {"input_ids": token_ids(2, 5)})
    neurons = next(group for group in groups if group.type == "neurons")
    plan = keep_all(groups).replace_groups([neurons.plan(neurons.first(neurons.counts[1]))])
    with fails_with(ErrorCode.INVALID_VALUE, field="plan"):
        pruned(model, plan)
