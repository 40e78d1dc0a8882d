"""Heads outside the attention interface are found where they are read, and gated there like all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from compressor.errors import ErrorCode, SiteRefusedError
from compressor.selection.measure_subsets import ActivationCache, NotRowsError, PartialForward
from compressor.selection.pruners.layerwise.layer_run import collect_inputs
from compressor.selection.subset_evaluator import sensitivity
from compressor.units import Site, find_groups, find_sites, gated, hooked, keep_all, keep_only, masked
from compressor.units.gating import spread_over_rows
from compressor.units.projections import called_projections, require_interface
from graph_passes import BlockMask
from tests.faults import fails_with
from tests.projection_models import SIZES
from tests.projection_zoo import FAMILIES, VISION
from tests.units.families import families
from tests.units.states import are_equal, forward, snapshot
from tests.zoo import FAMILIES as OF_THE_INTERFACE
from tests.zoo import text

POSITIONS_FIRST = {"xlnet", "fsmt"}
"""Families whose tensors are `[position, row, width]`."""
BOTH = ["bidirectional"] * 2 + ["causal", "cross"] * 2
KINDS: dict[str, list[str]] = {
    "mpnet": ["bidirectional"] * 2,
    "deberta-v2": ["bidirectional"] * 2,
    "xlnet": ["bidirectional"] * 2,
    "wavlm": ["bidirectional"] * 2,
    "torch-encoder": ["bidirectional"] * 2,
    "falcon": ["causal"] * 2,
    "bloom": ["causal"] * 2,
    "gptj": ["causal"] * 2,
    "trocr": ["causal"] * 2,
    "mvp": BOTH,
    "prophetnet": BOTH,
    "perceiver": ["cross", "bidirectional", "bidirectional", "cross"],
    "swinv2": ["bidirectional"] * 2,
}
PROJECTION = "encoder.layers.0.self_attn.out_proj"
QUERY, KEYS = (
    torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)),
    torch.linspace(-1, 1, 160).view(2, 5, 16),
)


def outputs_of(name: str, site: Site, gates: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a model with gates `[row, head]` of one site, and those of its rows gated alike, one by one."""
    family = FAMILIES[name]
    model, inputs = family.model(), family.inputs(3, 7)

    def output(of_rows: Tensor) -> Tensor:
        def multiply(gated_site: str, heads: Tensor) -> Tensor:
            return heads * spread_over_rows(of_rows, len(heads)) if gated_site == site.name else heads

        with hooked(model, multiply, sites=[site]):
            return forward(model, inputs)

    return output(gates), torch.stack([output(row.repeat(3, 1))[number] for number, row in enumerate(gates)])


@pytest.mark.parametrize("name", families(FAMILIES, ("mpnet", "xlnet", "wavlm", "torch-encoder", "bloom", "swinv2")))
def test_heads_are_found_and_every_one_of_them_matters(name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.model(), family.inputs(3, 7)
    expected = forward(model, inputs)
    before = snapshot(model)
    sites = find_sites(model, inputs)
    assert are_equal(before, snapshot(model))
    assert all(not weight.grad_fn and weight.grad is None for weight in model.parameters())
    assert {site.batch_axis for site in sites} == {int(name in POSITIONS_FIRST)}
    assert {site.head_dim for site in sites} <= {3, 8}
    with gated(model, keep_all(sites)):
        torch.testing.assert_close(forward(model, inputs), expected)
    last = sites[-1]
    for dropped in range(last.heads):
        kept = {(site.name, head): 1.0 for site in sites for head in range(site.heads)}
        del kept[last.name, dropped]
        with gated(model, keep_only(sites, kept)):
            assert not torch.allclose(forward(model, inputs), expected, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_attention(name: str) -> None:
    family = FAMILIES[name]
    assert [site.kind for site in find_sites(family.model(), family.inputs(2, 8))] == KINDS[name]


def test_query_heads_share_value_heads() -> None:
    for name, kv_heads in (("falcon", 2), ("falcon of one key/value head", 1), ("bloom", 4)):
        family = FAMILIES[name]
        sites = find_sites(family.model(), family.inputs(2, 8))
        assert {(site.heads, site.kv_heads, site.head_dim) for site in sites} == {(4, kv_heads, 8)}


@pytest.mark.parametrize("name", ["mpnet", "xlnet", "fsmt", "torch-encoder", "swinv2", "vitdet", "squeezebert"])
def test_a_single_row_shows_the_same_sites(name: str) -> None:
    family = FAMILIES[name]
    model = family.model()
    assert find_sites(model, family.inputs(1, 7)) == find_sites(model, family.inputs(3, 7))


def test_padding_that_attends_to_nothing_does_not_hide_heads() -> None:
    family = FAMILIES["cpmant"]
    model, inputs = family.model(), family.inputs(2, 8)
    expected = find_sites(model, inputs)
    assert find_sites(model, {"input_ids": inputs["input_ids"] * inputs["attention_mask"]}) == expected


def test_a_frozen_model_is_searched_and_stays_frozen() -> None:
    model = FAMILIES["mpnet"].model().requires_grad_(False)
    with torch.no_grad():
        assert len(find_sites(model, text())) == 2
    assert not any(weight.requires_grad for weight in model.parameters())


def test_a_forward_that_permits_no_gradients_shows_calls_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def through_numpy(module: torch.nn.Module) -> None:
        forward = module.forward
        monkeypatch.setattr(module, "forward", lambda x: torch.from_numpy(forward(x).numpy()))

    model, inputs = OF_THE_INTERFACE["bert"](0)
    expected = find_sites(model, inputs)
    through_numpy(model.get_submodule("bert.pooler"))
    assert find_sites(model, inputs) == expected
    mpnet = FAMILIES["mpnet"].model()
    through_numpy(mpnet.get_submodule("classifier"))
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, family="mpnet"):
        find_sites(mpnet, text())


def test_half_precision_is_precise_enough() -> None:
    model = FAMILIES["mpnet"].model()
    expected = find_sites(model, text())
    assert find_sites(model.bfloat16(), text()) == expected


def test_heads_that_no_output_depends_on_are_no_sites() -> None:
    """A classifier with SigLIP averages positions, and its pooling is computed in vain."""
    config = hf.SiglipConfig(vision_config={**VISION, "image_size": 12, "intermediate_size": 44})
    model = hf.SiglipForImageClassification(config).eval()
    sites = find_sites(model, FAMILIES["siglip"].inputs(2, 8))
    assert [site.name for site in sites] == [f"vision_model.encoder.layers.{layer}.self_attn" for layer in (0, 1)]
    assert len(find_sites(FAMILIES["siglip"].model(), FAMILIES["siglip"].inputs(2, 8))) == 3


def test_a_group_of_heads_ends_in_its_own_projection() -> None:
    heads, neurons = find_groups(FAMILIES["mpnet"].model(), text())[:2]
    assert (heads.name, heads.type, heads.linear) == ("mpnet.encoder.layer.0.attention.attn.o", "heads", heads.name)
    assert neurons.type == "neurons"


@pytest.mark.parametrize("name", ["mpnet", "xlnet", "fsmt", "torch-encoder", "squeezebert", "swinv2", "vitdet"])
def test_gates_may_differ_from_row_to_row(name: str) -> None:
    """Also where positions come before rows, where rows are split into windows, and where heads are channels."""
    family = FAMILIES[name]
    site = find_sites(family.model(), family.inputs(3, 7))[0]
    gates = torch.rand(3, site.heads, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(*outputs_of(name, site, gates))


def test_importance_is_the_derivative_by_the_gates() -> None:
    model = FAMILIES["mpnet"].model()
    sites = find_sites(model, text())
    batch = {**text(1), "labels": torch.tensor([1])}
    importance = sensitivity(model, sites, torch.ones(8, dtype=torch.bool), [batch])
    step = 1e-3
    gates = {site.name: torch.ones(1, site.heads) for site in sites}

    def loss(number: int, change: float) -> float:
        site, head = sites[number // 4], number % 4
        gates[site.name][0, head] += change
        with (
            torch.no_grad(),
            hooked(model, lambda name, out: out * spread_over_rows(gates[name], len(out)), sites=sites),
        ):
            value = float(model(**batch).loss)
        gates[site.name][0, head] -= change
        return value

    slopes = [abs(loss(number, step) - loss(number, -step)) / (2 * step) for number in range(8)]
    torch.testing.assert_close(importance, torch.tensor(slopes, dtype=torch.float64), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("name", ["mpnet", "wavlm"])
def test_forwards_are_replayed_for_several_subsets_at_once(name: str) -> None:
    model, inputs = FAMILIES[name].model(), FAMILIES[name].inputs(2, 8)
    sites, cache = find_sites(model, inputs), ActivationCache()
    run = PartialForward(model, sites)
    run.run(inputs, torch.ones(1, 8), record=cache)
    changed = torch.ones(2, 8)
    changed[0, 4] = changed[1, 6] = 0
    together = run.run(inputs, changed, base=cache, call=cache.first_call({sites[1].name}))[0]
    torch.testing.assert_close(together, torch.cat([run.run(inputs, gates[None])[0] for gates in changed]))


def test_subsets_do_not_share_a_forward_where_positions_come_first() -> None:
    family = FAMILIES["xlnet"]
    model, inputs = family.model(), family.inputs(2, 4)
    with pytest.raises(NotRowsError):
        PartialForward(model, find_sites(model, inputs)).run(inputs, torch.ones(2, 8))


@pytest.mark.parametrize("name", ["mpnet", "xlnet"])
def test_masks_are_refused_where_no_call_can_be_intercepted(name: str) -> None:
    model = FAMILIES[name].model()
    sites = find_sites(model, text())
    refusal = {"family": model.config.model_type, "site": sites[0].name}
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, **refusal):
        require_interface(model, sites, "block masks")
    plan = keep_all(sites).masked({sites[0].name: BlockMask(torch.ones(4, 1, 1, dtype=torch.bool).numpy())})
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, **refusal), masked(model, plan):
        pass


def test_the_interface_has_all_sites_of_its_families() -> None:
    for name in ("bert", "t5", "all_attention", "whisper"):
        model, inputs = OF_THE_INTERFACE[name](0)
        require_interface(model, find_sites(model, inputs), "block masks")


def test_the_softmax_of_a_router_is_no_attention() -> None:
    sizes = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes)).eval()
    assert [site.name for site in find_sites(model, text())] == [f"model.layers.{layer}.self_attn" for layer in (0, 1)]


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
    collect_inputs(model, inputs, [PROJECTION], lambda call: read.append(call.inputs.shape))
    assert read == [(int(inputs["attention_mask"].sum()), 32)]
