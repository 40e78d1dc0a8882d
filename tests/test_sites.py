"""Sites, hook and gates: what is found, that gates of one change nothing, that everything is restored."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from compressor.errors import InputError, SiteRefusedError, UsageError
from compressor.units import Site, check_plan, find_sites, gated, hooked, keep_all
from compressor.units.hook import Attention, OutputHook, configs
from graph_passes import Plan, SitePlan
from tests.zoo import FAMILIES, pair, random_plan, text

FOUR = (4, 4, 8)
GROUPED = (4, 2, 8)
SITES: dict[str, tuple[list[str], str, tuple[int, int, int]]] = {
    "bert": (["bidirectional"] * 3, "bert.encoder.layer.0.attention.self", FOUR),
    "roberta": (["bidirectional"] * 3, "roberta.encoder.layer.0.attention.self", FOUR),
    "distilbert": (["bidirectional"] * 3, "distilbert.transformer.layer.0.attention", FOUR),
    "electra": (["bidirectional"] * 3, "electra.encoder.layer.0.attention.self", FOUR),
    "modernbert": (["bidirectional"] * 3, "model.layers.0.attn", FOUR),
    "gpt2": (["causal"] * 3, "transformer.h.0.attn", FOUR),
    "llama": (["causal"] * 3, "model.layers.0.self_attn", GROUPED),
    "qwen3": (["causal"] * 3, "model.layers.0.self_attn", GROUPED),
    "t5": (["bidirectional"] * 2 + ["causal", "cross"] * 2, "encoder.block.0.layer.0.SelfAttention", FOUR),
    "bart": (["bidirectional"] * 2 + ["causal", "cross"] * 2, "model.encoder.layers.0.self_attn", FOUR),
    "marian": (["bidirectional"] * 2 + ["causal", "cross"] * 2, "model.encoder.layers.0.self_attn", FOUR),
    "vit": (["bidirectional"] * 3, "vit.layers.0.attention", FOUR),
    "clip_text": (["causal"] * 3, "text_model.encoder.layers.0.self_attn", FOUR),
    "whisper": (["bidirectional"] * 2 + ["causal", "cross"] * 2, "model.encoder.layers.0.self_attn", FOUR),
    "all_attention": (["causal"] * 3, "model.layers.0.attention", FOUR),
    "transformer_xl": (["causal"] * 3, "model.layers.0.attention", FOUR),
}


def run(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def recording(calls: list[str], word: str | None = None) -> OutputHook:
    """A hook that notes each call and changes nothing."""

    def hook(site: str, out: Tensor) -> Tensor:
        calls.append(word or site)
        return out

    return hook


def state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that a context could leave changed."""
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "buffers": [name for name, _ in model.named_buffers()],
        "weights": {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()},
        "training": [module.training for module in model.modules()],
        "attention": [(id(config), config._attn_implementation) for config in configs(model)],
        "config": model.config.to_dict(),
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "interface": AttentionInterface.get_interface,
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    first, second = before.pop("weights"), after.pop("weights")
    weights = first.keys() == second.keys() and all(
        first[name][0] == second[name][0] and torch.equal(first[name][1], second[name][1]) for name in first
    )
    return weights and before == after


@pytest.mark.parametrize("name", FAMILIES)
def test_sites_are_found_in_call_order(name: str) -> None:
    model, inputs = FAMILIES[name](0)
    kinds, first, sizes = SITES[name]
    sites = find_sites(model, inputs)
    assert [site.kind for site in sites] == kinds
    assert sites[0].name == first
    assert {(site.heads, site.kv_heads, site.head_dim) for site in sites} == {sizes}
    assert find_sites(model, inputs, attention="eager") == find_sites(model, inputs, attention="sdpa") == sites


@pytest.mark.parametrize("attention", [None, "eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gates_of_one_change_no_bit(name: str, attention: Attention | None) -> None:
    model, inputs = FAMILIES[name](0)
    plan = keep_all(find_sites(model, inputs))
    alone = copy.deepcopy(model)
    if attention is not None:
        alone.set_attn_implementation(attention)
    before = state(model)
    with gated(model, plan, attention=attention):
        got = run(model, inputs)
    assert torch.equal(got, run(alone, inputs))
    assert same(before, state(model))


@pytest.mark.parametrize("name", FAMILIES)
def test_eager_and_sdpa_gate_the_same(name: str) -> None:
    model, inputs = FAMILIES[name](0)
    plan = random_plan(find_sites(model, inputs), np.random.default_rng(5))
    outputs = []
    for attention in ("eager", "sdpa"):
        with gated(model, plan, attention=attention):
            outputs.append(run(model, inputs))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5 * float(outputs[0].abs().max()))
    assert not torch.allclose(outputs[0], run(model, inputs), atol=1e-2)


PROJECTIONS = {
    "bert": ("self", "output.dense", 1),
    "gpt2": ("attn", "attn.c_proj", 0),
    "llama": ("self_attn", "self_attn.o_proj", 1),
    "t5": ("Attention", "Attention.o", 1),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_closed_gate_is_a_zeroed_slice_of_the_output_projection(name: str) -> None:
    model, inputs = FAMILIES[name](0)
    plan = random_plan(find_sites(model, inputs), np.random.default_rng(1))
    with gated(model, plan, attention="eager"):
        got = run(model, inputs)
    attention, projection, axis = PROJECTIONS[name]
    model.set_attn_implementation("eager")
    for site in plan.sites:
        weight = model.get_parameter(f"{site.name.removesuffix(attention)}{projection}.weight")
        gate = torch.tensor(site.gate).repeat_interleave(site.head_dim)
        weight.data.mul_(gate if axis == 1 else gate[:, None])
    torch.testing.assert_close(got, run(model, inputs), rtol=1e-4, atol=1e-5)


def test_shared_layers_are_one_site() -> None:
    model = hf.AlbertForSequenceClassification(
        hf.AlbertConfig(
            vocab_size=99, embedding_size=20, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
            intermediate_size=44,
        )
    ).eval()  # fmt: skip
    calls: list[str] = []
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert find_sites(model, text()) == [Site(name, "bidirectional", 4, 4, 8)]
    with hooked(model, recording(calls)):
        run(model, text())
    assert calls == [name] * 3


REFUSED = {
    "deberta-v2": lambda: hf.DebertaV2ForSequenceClassification(
        hf.DebertaV2Config(
            vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=44
        )
    ),
    "mpnet": lambda: hf.MPNetForSequenceClassification(
        hf.MPNetConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=44)
    ),
    "xlnet": lambda: hf.XLNetForSequenceClassification(
        hf.XLNetConfig(vocab_size=99, d_model=32, n_layer=1, n_head=4, d_inner=44)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_off_the_hook_is_refused_by_name(name: str) -> None:
    model = REFUSED[name]()
    before = state(model)
    with pytest.raises(SiteRefusedError, match=rf"^{name}: .*what works: BERT, .*Whisper"):
        find_sites(model, text())
    assert same(before, state(model))


def test_sdpa_is_refused_where_it_would_mean_something_else() -> None:
    config = hf.Gemma2Config(
        vocab_size=99, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=44, pad_token_id=0,
    )  # fmt: skip
    model = hf.Gemma2ForCausalLM(config).eval()
    assert [site.kind for site in find_sites(model, text())] == ["causal"]
    with pytest.raises(SiteRefusedError, match="ask for attention='eager'"):
        find_sites(model, text(), attention="sdpa")
    with pytest.raises(UsageError, match="use 'eager' or 'sdpa'"):
        find_sites(model, text(), attention="flash")  # type: ignore[arg-type]


def test_a_mask_of_padding_alone_is_not_taken_for_causal() -> None:
    model = hf.LayoutLMModel(
        hf.LayoutLMConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=44
        )
    )
    assert [site.kind for site in find_sites(model, text())] == ["bidirectional"]


def test_cross_attention_is_seen_at_equal_lengths() -> None:
    model, _ = FAMILIES["bart"](0)
    kinds = [site.kind for site in find_sites(model, pair(length=6, target=6))]
    assert kinds == ["bidirectional", "bidirectional", "causal", "cross", "causal", "cross"]


@pytest.mark.parametrize("inputs", [text(1, 7), text(3, 2), {"input_ids": torch.full((2, 6), 8)}])
def test_sites_do_not_depend_on_the_inputs(inputs: dict[str, Tensor]) -> None:
    for name, kind in (("bert", "bidirectional"), ("gpt2", "causal")):
        assert {site.kind for site in find_sites(FAMILIES[name](0)[0], inputs)} == {kind}


@pytest.mark.parametrize("attention", [None, "eager", "sdpa"])
def test_causality_holds_under_the_hook(attention: Attention | None) -> None:
    model, _ = FAMILIES["gpt2"](0)
    inputs = text()
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, 4] = 3
    with hooked(model, lambda _, out: out * 0.5, attention=attention):
        first, second = run(model, inputs), run(model, changed)
    torch.testing.assert_close(first[:, :4], second[:, :4])
    assert not torch.allclose(first[:, 4], second[:, 4])


def test_training_under_the_hook_is_training_without() -> None:
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
    with hooked(model, lambda name, out: out * gates[name]):
        got = gradients()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert all(gate.grad is not None and bool((gate.grad != 0).all()) for gate in gates.values())


def test_contexts_nest_and_leave_other_models_alone() -> None:
    model, inputs = FAMILIES["bert"](0)
    other = FAMILIES["bert"](1)[0]
    alone = run(other, inputs)
    order: list[str] = []
    with (
        hooked(model, recording(order, "outer")),
        hooked(model, recording(order, "inner")),
    ):
        run(model, inputs)
        assert torch.equal(run(other, inputs), alone)
    assert sorted(order) == ["inner"] * 3 + ["outer"] * 3


def test_maps_are_watched_in_eager_attention_only() -> None:
    model, inputs = FAMILIES["qwen3"](0)
    maps: dict[str, Tensor] = {}
    with hooked(model, lambda _, out: out, attention="eager", on_weights=maps.__setitem__):
        run(model, inputs)
    assert {tuple(value.shape) for value in maps.values()} == {(3, 4, 7, 7)}
    assert all(torch.allclose(value.sum(-1), torch.ones(3, 4, 7)) for value in maps.values())
    with (
        pytest.raises(SiteRefusedError, match="returns no map; ask for attention='eager'"),
        hooked(model, lambda _, out: out, attention="sdpa", on_weights=maps.__setitem__),
    ):
        run(model, inputs)


def test_wrappers_of_training_do_not_show_in_names() -> None:
    model, inputs = FAMILIES["bert"](0)
    wrapped = torch.nn.DataParallel(model)
    sites = find_sites(wrapped, inputs)
    assert sites == find_sites(model, inputs)
    calls: list[str] = []
    with hooked(wrapped, recording(calls)):
        wrapped(**inputs)
    assert calls == [site.name for site in sites]
    replica = copy.deepcopy(model)
    for module in replica.modules():
        vars(module)["_is_replica"] = True  # what DataParallel sets on its copies
    with pytest.raises(UsageError, match="accelerate launch"), hooked(model, lambda _, out: out):
        run(replica, inputs)
    with pytest.raises(InputError, match="Linear is no transformers model"):
        find_sites(torch.nn.Linear(2, 2), {})


def _interrupted(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    model(**inputs)
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_everything_is_restored_after_an_error(name: str) -> None:
    model, inputs = FAMILIES[name](0)
    plan = random_plan(find_sites(model, inputs), np.random.default_rng(0))
    before = state(model.train())
    with pytest.raises(KeyboardInterrupt), gated(model, plan, attention="eager"):
        _interrupted(model, inputs)
    assert same(before, state(model))
    before = state(model)
    with pytest.raises(ValueError, match="input_ids"):
        find_sites(model, {})
    assert same(before, state(model))


def _changed(plan: Plan, **change: Any) -> Plan:
    first = {field: getattr(plan.sites[0], field) for field in ("name", "kind", "heads", "kv_heads", "head_dim")}
    site = SitePlan(**{**first, "kept": (0,), **change})
    return plan.model_copy(update={"sites": (site, *plan.sites[1:])})


def test_a_plan_of_another_model_is_refused() -> None:
    model, inputs = FAMILIES["bert"](0)
    sites = find_sites(model, inputs)
    plan = keep_all(sites)
    check_plan(plan, sites)
    name = sites[0].name
    for change, message in (
        ({"name": "nowhere"}, "no attention site nowhere, its sites are bert.encoder"),
        ({"heads": 6, "kv_heads": 6}, f"{name}: heads is 6 there, 4 in the model"),
        ({"kv_heads": 2}, f"{name}: kv_heads is 2 there, 4 in the model"),
        ({"kind": "causal"}, f"{name}: kind is causal there, bidirectional in the model"),
    ):
        with pytest.raises(InputError, match=message):
            check_plan(_changed(plan, **change), sites)
    short = plan.model_copy(update={"sites": plan.sites[1:]})
    with pytest.raises(InputError, match=f"site {name} of the model is missing"):
        check_plan(short, sites)

    before = state(model)
    with pytest.raises(InputError, match="bert has no module nowhere"), gated(model, _changed(plan, name="nowhere")):
        pass
    with pytest.raises(InputError, match=f"{name} is gated already"), gated(model, plan), gated(model, plan):
        pass
    with pytest.raises(InputError, match=f"site {name} of the model is missing"), gated(model, short):
        run(model, inputs)
    with (
        pytest.raises(InputError, match=f"{name}: 1 heads of 8 there, 4 of 8 in the model"),
        gated(model, _changed(plan, heads=1, kv_heads=1)),
    ):
        run(model, inputs)
    assert same(before, state(model))


def test_gates_follow_the_precision_of_the_model() -> None:
    model, inputs = FAMILIES["llama"](0)
    model.bfloat16()
    expected = run(model, inputs)
    with gated(model, keep_all(find_sites(model, inputs))):
        assert {value.dtype for name, value in model.named_buffers() if name.endswith("head_gate")} == {torch.bfloat16}
        assert torch.equal(run(model, inputs), expected)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, compressor; assert 'find_sites' in dir(compressor); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    import compressor

    assert compressor.find_sites is find_sites
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        compressor.nothing  # noqa: B018
