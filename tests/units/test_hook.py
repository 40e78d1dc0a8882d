"""The hook intercepts attention calls in training and evaluation, and restores everything."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, SiteRefusedError, UsageError
from compressor.units import Attention, find_sites, hooked
from tests.faults import fails_with
from tests.units.states import are_equal, forward, recorder, snapshot
from tests.zoo import FAMILIES, text


@pytest.mark.parametrize("attention", [None, "eager", "sdpa"])
def test_causality_holds_under_the_hook(attention: Attention | None) -> None:
    model, _ = FAMILIES["gpt2"](0)
    inputs = text()
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, 4] = 3
    with hooked(model, lambda _, output: output * 0.5, attention=attention):
        first, second = forward(model, inputs), forward(model, changed)
    torch.testing.assert_close(first[:, :4], second[:, :4])
    assert not torch.allclose(first[:, 4], second[:, 4])


def test_gradients_are_equal_with_and_without_the_hook() -> None:
    model, inputs = FAMILIES["bert"](0)
    labels = torch.tensor([0, 1, 0])
    model.train()

    def gradients() -> dict[str, Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}

    expected = gradients()
    gates = {site.name: torch.ones(4, 1, requires_grad=True) for site in find_sites(model, inputs)}
    assert model.training
    with hooked(model, lambda name, output: output * gates[name]):
        actual = gradients()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    assert all(gate.grad is not None and bool((gate.grad != 0).all()) for gate in gates.values())


def test_contexts_nest_and_do_not_affect_another_model() -> None:
    model, inputs = FAMILIES["bert"](0)
    second = FAMILIES["bert"](1)[0]
    expected = forward(second, inputs)
    calls: list[str] = []
    with (
        hooked(model, recorder(calls, "outer")),
        hooked(model, recorder(calls, "inner")),
    ):
        forward(model, inputs)
        assert torch.equal(forward(second, inputs), expected)
    assert sorted(calls) == ["inner"] * 3 + ["outer"] * 3


def test_proxies_of_modules_are_hooked() -> None:
    # torch.export calls modules as proxies that share their attributes, for example in Phi-4 multimodal.
    model, inputs = FAMILIES["bert"](0)
    names = [site.name for site in find_sites(model, inputs)]
    calls: list[str] = []
    with hooked(model, recorder(calls)):
        for layer in model.get_submodule("bert.encoder.layer").children():
            attention = layer.get_submodule("attention")
            module = attention.get_submodule("self")
            proxy = object.__new__(type(module))
            proxy.__dict__ = module.__dict__
            attention._modules["self"] = proxy
        forward(model, inputs)
    assert calls == names


def test_maps_are_returned_by_eager_attention_only() -> None:
    model, inputs = FAMILIES["qwen3"](0)
    maps: dict[str, Tensor] = {}
    with hooked(
        model,
        lambda _, output: output,
        attention="eager",
        on_weights=lambda call, weights: maps.update({call.site: weights}),
    ):
        forward(model, inputs)
    assert {tuple(value.shape) for value in maps.values()} == {(3, 4, 7, 7)}
    assert all(torch.allclose(value.sum(-1), torch.ones(3, 4, 7)) for value in maps.values())
    with (
        fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, site="model.layers.0.self_attn", attention="sdpa"),
        hooked(
            model,
            lambda _, output: output,
            attention="sdpa",
            on_weights=lambda call, weights: maps.update({call.site: weights}),
        ),
    ):
        forward(model, inputs)


def test_a_wrapped_model_is_hooked_and_a_replica_is_refused() -> None:
    model, inputs = FAMILIES["bert"](0)
    wrapped = torch.nn.DataParallel(model)
    calls: list[str] = []
    with hooked(wrapped, recorder(calls)):
        wrapped(**inputs)
    assert calls == [site.name for site in find_sites(model, inputs)]
    replica = copy.deepcopy(model)
    for module in replica.modules():
        vars(module)["_is_replica"] = True  # as DataParallel marks its replicas
    with (
        fails_with(ErrorCode.UNSUPPORTED, UsageError, value="DataParallel"),
        hooked(model, lambda _, output: output),
    ):
        forward(replica, inputs)


def test_sdpa_is_refused_if_it_computes_something_else() -> None:
    config = hf.Gemma2Config(
        vocab_size=99, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=44, pad_token_id=0,
    )  # fmt: skip
    model = hf.Gemma2ForCausalLM(config).eval()
    assert [site.kind for site in find_sites(model, text())] == ["causal"]
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, family="gemma2", attention="sdpa"):
        find_sites(model, text(), attention="sdpa")


def test_an_unknown_attention_is_refused() -> None:
    model, inputs = FAMILIES["bert"](0)
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="attention", value="flash"):
        find_sites(model, inputs, attention="flash")  # type: ignore[arg-type]


def test_an_attention_without_a_hook_is_refused() -> None:
    model, inputs = FAMILIES["bert"](0)
    model.config._attn_implementation_internal = "flex_attention"
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, family="bert", attention="flex_attention"):
        find_sites(model, inputs)


def _interrupted(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    model(**inputs)
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_everything_is_restored_after_an_error(name: str) -> None:
    model, inputs = FAMILIES[name](0)
    before = snapshot(model.train())
    with pytest.raises(KeyboardInterrupt), hooked(model, lambda _, output: output * 0.5, attention="eager"):
        _interrupted(model, inputs)
    assert are_equal(before, snapshot(model))
