"""Attention by entmax-1.5: true zeros, gradients, softmax again afterwards, and what it cannot stand in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bert import modeling_bert

from compressor.errors import SiteRefusedError, TargetMissingError
from compressor.units import entmax as module
from compressor.units import find_sites, gated, hooked, keep_all
from compressor.units.entmax import with_entmax
from tests.zoo import FAMILIES

entmax = pytest.importorskip("entmax")


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "llama"])
def test_maps_are_those_of_entmax(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and any(
                part in name for part in ("query", "key", "q_proj", "k_proj", "c_attn", ".q.")
            ):
                weight.mul_(20.0)  # scores that lie apart
    plan = keep_all(find_sites(model, inputs))
    seen: list[Tensor] = []

    def see(name: str, weights: Tensor) -> None:
        seen.append(weights)

    with torch.no_grad():
        before = model(**inputs).logits
        with with_entmax(model), gated(model, plan), hooked(model, lambda name, out: out, on_weights=see):
            sharp = model(**inputs).logits
        after = model(**inputs).logits
    assert torch.equal(before, after)
    assert not torch.allclose(before, sharp, atol=1e-6)
    for weights in seen:
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    own = seen[0][0]
    visible = own[..., -1, :] if family in ("gpt2", "llama") else own
    assert (visible == 0).any()


def test_gradients_flow_through_it() -> None:
    model, inputs = FAMILIES["bert"](0)
    with with_entmax(model):
        model(**inputs).logits.sum().backward()
    grads = [weight.grad for name, weight in model.named_parameters() if "query.weight" in name]
    assert all(grad is not None and torch.isfinite(grad).all() and grad.any() for grad in grads)


def test_an_attention_that_is_more_than_a_softmax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = FAMILIES["bert"](0)
    plain = modeling_bert.eager_attention_forward

    def capped(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, weights = plain(*args, **options)
        return torch.tanh(out), weights

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", capped)
    with pytest.raises(SiteRefusedError, match="more than a softmax of scaled products"), with_entmax(model):
        model(**inputs)


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "entmax", None)
    with pytest.raises(TargetMissingError, match=r"pip install 'compressor\[entmax\]'"):
        module.entmax_function()
