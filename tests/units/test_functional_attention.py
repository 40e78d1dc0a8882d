"""PyTorch's own attention function computes the same where it calls its output projections as modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressor.selection.pruners.layerwise.linear_inputs import collect_inputs
from compressor.units import find_groups
from compressor.units.functional_attention import called_projections
from tests.projection_zoo import FAMILIES
from tests.units.states import forward
from tests.zoo import text

PROJECTION = "encoder.layers.0.self_attn.out_proj"
QUERY, KEYS = (
    torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)),
    torch.linspace(-1, 1, 160).view(2, 5, 16),
)


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, **options)
    nn.init.normal_(module.out_proj.bias)
    return module.eval()


def results(module: nn.Module, *inputs: Tensor, **options: Any) -> list[Tensor]:
    """The output of an attention and the gradients of its parameters."""
    output = module(*inputs, **options)[0]
    return [output, *torch.autograd.grad(output.square().sum(), list(module.parameters()))]


@pytest.mark.parametrize(
    ("options", "inputs", "call"),
    [
        ({"batch_first": True}, (QUERY, KEYS, KEYS), {}),
        ({"batch_first": True}, (QUERY, KEYS, KEYS), {"need_weights": False}),
        ({}, (QUERY, KEYS[:, :3], KEYS[:, :3]), {}),
        ({}, (QUERY[0], KEYS[0], KEYS[0]), {"need_weights": False}),
        ({"batch_first": True, "bias": False}, (QUERY[:0], KEYS[:0], KEYS[:0]), {}),
        ({"kdim": 16, "vdim": 16, "add_bias_kv": True, "batch_first": True}, (QUERY, KEYS, KEYS), {}),
    ],
)
def test_outputs_and_gradients_are_equal(options: Any, inputs: tuple[Tensor, ...], call: Any) -> None:
    module = attention(**options) if options.get("bias", True) else nn.MultiheadAttention(16, 4, **options).eval()
    expected = results(module, *inputs, **call)
    read: list[torch.Size] = []
    module.out_proj.register_forward_pre_hook(lambda _, args: read.append(args[0].shape))
    with called_projections(module):
        torch.testing.assert_close(results(module, *inputs, **call), expected)
    rows_first = inputs[0] if options.get("batch_first") else inputs[0].unsqueeze(1).flatten(1, -2).transpose(0, 1)
    assert read == [rows_first.shape]


def test_the_context_may_be_nested_and_ends() -> None:
    model, second = FAMILIES["torch-encoder"].model(), FAMILIES["torch-encoder"].model()
    calls: list[torch.Size] = []
    for network in (model, second):
        network.get_submodule(PROJECTION).register_forward_pre_hook(lambda _, args: calls.append(args[0].shape))
    functions = F.multi_head_attention_forward, F.linear
    inputs, expected = text(), forward(model, text())
    with called_projections(model), called_projections(second), called_projections(model):
        torch.testing.assert_close(forward(model, inputs), expected)
        torch.testing.assert_close(forward(second, inputs), expected)
    forward(model, inputs)
    assert calls == [(*inputs["input_ids"].shape, 32)] * 2
    assert (F.multi_head_attention_forward, F.linear) == functions
    assert torch.backends.mha.get_fastpath_enabled()


def test_an_error_of_a_hook_leaves_nothing_behind() -> None:
    module, linear = attention(batch_first=True), F.linear
    expected = module(QUERY, KEYS, KEYS)[0]
    handle = module.out_proj.register_forward_pre_hook(lambda _, args: 1 / 0)
    with called_projections(module):
        with pytest.raises(ZeroDivisionError):
            module(QUERY, KEYS, KEYS)
        assert F.linear is linear
        handle.remove()
        torch.testing.assert_close(module(QUERY, KEYS, KEYS)[0], expected)


def test_projections_with_one_weight_and_two_biases_stay_apart() -> None:
    first, second = attention(batch_first=True), attention(batch_first=True)
    second.out_proj.weight = first.out_proj.weight
    nn.init.ones_(second.out_proj.bias)
    expected = [module(QUERY, KEYS, KEYS)[0] for module in (first, second)]
    with called_projections(nn.ModuleList([first, second])):
        torch.testing.assert_close([module(QUERY, KEYS, KEYS)[0] for module in (first, second)], expected)


def test_parametrized_weights_are_not_computed_for_the_search() -> None:
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), attention(batch_first=True))
    norm: Any = module.get_submodule("0.parametrizations.weight.0")
    before = norm._u.clone()
    with called_projections(module.train()):
        module[1](QUERY, KEYS, KEYS)
    assert torch.equal(norm._u, before)


def test_a_group_ends_in_the_projection_whose_inputs_are_collected() -> None:
    model, inputs = FAMILIES["torch-encoder"].model(), text()
    heads, neurons = find_groups(model, inputs)[:2]
    assert (heads.name, heads.linear, neurons.type) == (PROJECTION, PROJECTION, "neurons")
    read: list[torch.Size] = []
    collect_inputs(model, inputs, [PROJECTION], lambda name, rows, weights: read.append(rows.shape))
    assert read == [(int(inputs["attention_mask"].sum()), 32)]
