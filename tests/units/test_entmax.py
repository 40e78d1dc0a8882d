"""Attention with entmax-1.5: true zeros, gradients, softmax again afterwards, and families that it refuses."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bert import modeling_bert

from compressor.errors import ErrorCode, SiteRefusedError, TargetMissingError
from compressor.units import find_sites, gated, hooked, keep_all
from compressor.units.entmax import entmax_function, with_entmax
from tests.faults import fails_with
from tests.zoo import FAMILIES

pytest.importorskip("entmax")
QUERY_KEY = ("query", "key", "q_proj", "k_proj", "c_attn", ".q.")
"""Parts of the names of query and key projections."""


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "llama"])
def test_maps_equal_those_of_entmax(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and any(part in name for part in QUERY_KEY):
                weight.mul_(20.0)  # scores that differ by much
    plan = keep_all(find_sites(model, inputs))
    maps: dict[str, Tensor] = {}
    with torch.no_grad():
        before = model(**inputs).logits
        with (
            with_entmax(model),
            gated(model, plan),
            hooked(model, lambda _, output: output, on_weights=lambda call, weights: maps.update({call.site: weights})),
        ):
            sparse = model(**inputs).logits
        after = model(**inputs).logits
    assert torch.equal(before, after)
    assert not torch.allclose(before, sparse, atol=1e-6)
    assert maps.keys() == {site.name for site in plan.sites}
    for weights in maps.values():
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    first = maps[plan.sites[0].name][0]
    visible = first[..., -1, :] if plan.sites[0].kind == "causal" else first
    assert (visible == 0).any()


def test_gradients_flow_through_entmax() -> None:
    model, inputs = FAMILIES["bert"](0)
    with with_entmax(model):
        model(**inputs).logits.sum().backward()
    grads = [weight.grad for name, weight in model.named_parameters() if "query.weight" in name]
    assert all(grad is not None and torch.isfinite(grad).all() and grad.any() for grad in grads)


def test_an_attention_that_is_more_than_a_softmax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = FAMILIES["bert"](0)
    plain = modeling_bert.eager_attention_forward

    def capped(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        output, weights = plain(*args, **options)
        return torch.tanh(output), weights

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", capped)
    site = "bert.encoder.layer.0.attention.self"
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, site=site, family="bert"), with_entmax(model):
        model(**inputs)


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "entmax", None)
    with fails_with(ErrorCode.PACKAGE_MISSING, TargetMissingError, package="entmax"):
        entmax_function()
