"""Block masks in PyTorch and in the exported graph: which pairs of positions remain, also with caches and memories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compressor.errors import ErrorCode, InputError
from compressor.export import export_reference
from compressor.units import Attention, Site, find_sites, gated, keep_all, masked
from graph_passes import BlockMask, Plan, load, save
from graph_passes.passes import ReducePrecision
from tests.faults import fails_with
from tests.law.outputs import relative_error, run
from tests.units.families import families
from tests.units.masks import maps_and_outputs, one_layer, random_mask
from tests.units.states import are_equal, snapshot
from tests.zoo import FAMILIES, text


@pytest.mark.parametrize("family", families(FAMILIES, ("bert", "llama", "t5", "all_attention")))
def test_a_masked_map_equals_the_map_over_the_remaining_pairs(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    sites = find_sites(model, inputs)
    unmasked = keep_all(sites)
    before, _ = maps_and_outputs(model, inputs, unmasked)
    for kind in {site.kind for site in sites}:
        site = next(site for site in sites if site.kind == kind)
        mask = random_mask(site, model, seed=1)
        after, outputs = maps_and_outputs(model, inputs, unmasked.masked({site.name: mask}))
        persistent = getattr(model.get_submodule(site.name), "persistent", 0)
        queries, keys = before[site.name].shape[2:]
        memory = keys - persistent - queries if mask.memory else 0
        entries = mask.entries(queries, keys - persistent, memory=memory)
        allowed = np.pad(entries, ((0, 0), (0, 0), (0, persistent)), constant_values=True)
        remaining = before[site.name] * torch.from_numpy(allowed)
        total = remaining.sum(-1, keepdim=True)
        attends = total[..., 0] > 0
        assert torch.allclose(after[site.name][attends], (remaining / total)[attends], atol=1e-5)
        assert not outputs[site.name].transpose(1, 2)[~attends].any()
        assert bool(attends.any())
        assert persistent or not bool(attends.all())


@pytest.mark.parametrize(
    ("family", "opset", "attention"),
    [
        ("all_attention", 18, "eager"),
        ("bart", 18, "eager"),
        ("bert", 18, "eager"),
        ("gpt2", 18, "sdpa"),
        ("llama", 23, "sdpa"),
        ("t5", 23, "eager"),
    ],
)
@pytest.mark.zoo
def test_the_graph_holds_the_masks_and_computes_the_same(
    family: str, opset: int, attention: Attention, tmp_path: Path
) -> None:
    model, inputs = one_layer(family)
    sites = find_sites(model, inputs, attention=attention)
    masks = {site.name: random_mask(site, model, seed, block=8) for seed, site in enumerate(sites)}
    plan = keep_all(sites).masked(masks)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    export_reference(model, plan, inputs, tmp_path / "graph.onnx", opset=opset, attention=attention)
    before = snapshot(model)
    with torch.no_grad(), gated(model, plan, attention=attention):
        expected = model(**inputs).logits.numpy()
    assert are_equal(before, snapshot(model))
    feeds = {name: value.numpy() for name, value in inputs.items()}
    (outputs,) = run(tmp_path / "graph.onnx", [feeds])
    assert relative_error([[expected]], [outputs[:1]]) <= 1e-4


@pytest.mark.parametrize("family", ["gpt2", "llama", "all_attention", "bart"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_mask_never_reveals_a_later_position(family: str, attention: Attention) -> None:
    model, inputs = FAMILIES[family](0)
    sites = find_sites(model, inputs)
    masks = {
        site.name: random_mask(site, model, seed, share=0.2) for seed, site in enumerate(sites) if site.kind == "causal"
    }
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    changed = {**inputs, name: inputs[name].clone()}
    changed[name][:, 3:] = 9
    with torch.no_grad(), gated(model, keep_all(sites).masked(masks), attention=attention):
        first, second = model(**inputs).logits, model(**changed).logits
    assert torch.equal(first[:, :3], second[:, :3])
    assert not torch.equal(first[:, 3:], second[:, 3:])


@pytest.mark.parametrize("family", ["llama", "bart", "t5"])
def test_queries_are_the_last_positions_if_keys_are_cached(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    sites = find_sites(model, inputs)
    plan = keep_all(sites).masked({site.name: random_mask(site, model, 3, share=0.6) for site in sites})
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids = inputs.pop(name)
    source: dict[str, Any] = {name: inputs[name] for name in ("input_ids", "attention_mask") if "input_ids" in inputs}
    with torch.no_grad(), gated(model, plan):
        expected = model(**source, **{name: ids}).logits
        start = model(**source, **{name: ids[:, :4]}, use_cache=True)
        if source:  # the encoder does not run between two calls of the decoder
            states = (start.encoder_last_hidden_state,)
            source = {"attention_mask": source["attention_mask"], "encoder_outputs": states}
        end = model(**source, **{name: ids[:, 4:]}, past_key_values=start.past_key_values).logits
    assert torch.allclose(expected[:, 4:], end, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "window", "static"])
def test_every_cache_aligns_queries_and_keys(kind: str) -> None:
    """Token by token, with a cache of all keys, of the last ones, or with room for more than the mask covers."""
    config = transformers.MistralConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4 if kind == "window" else None,
    )
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    ids = torch.randint(1, 50, (2, 12))
    sites = find_sites(model, {"input_ids": ids})
    rng = np.random.default_rng(3)
    masks = {site.name: BlockMask(rng.random((site.heads, 12, 12)) < 0.6) for site in sites}
    cache = transformers.StaticCache(config=model.config, max_cache_len=20) if kind == "static" else None
    with torch.no_grad(), gated(model, keep_all(sites).masked(masks)):
        expected = model(input_ids=ids).logits
        start = model(input_ids=ids[:, :7], past_key_values=cache, use_cache=True)
        logits, cache = [start.logits], start.past_key_values
        for position in range(7, 12):
            step = model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            logits.append(step.logits)
    assert torch.allclose(expected, torch.cat(logits, dim=1), atol=1e-5)


def test_a_mask_that_does_not_fit_is_refused() -> None:
    model, inputs = FAMILIES["bert"](0)
    plan, name = keep_all(find_sites(model, inputs)), "bert.encoder.layer.0.attention.self"
    short = plan.masked({name: BlockMask(np.ones((4, 5, 5), np.bool_))})
    sizes = {"site": name, "actual": (7, 7, 0), "maximum": (5, 5, 0)}
    with fails_with(ErrorCode.TOO_LONG, InputError, **sizes), masked(model, short):
        model(**inputs)
    sites = [Site(name, "bidirectional", 3, 3, 8)]
    three_heads = keep_all(sites).masked({name: BlockMask(np.ones((3, 7, 7), np.bool_))})
    with (
        fails_with(ErrorCode.PLAN_MISMATCH, InputError, site=name, planned=3, actual=4),
        masked(model, three_heads),
    ):
        model(**inputs)
    other_model, _ = FAMILIES["gpt2"](0)
    with fails_with(ErrorCode.PLAN_MISMATCH, InputError, site=name), masked(other_model, short):
        pass


def test_a_message_names_the_sizes() -> None:
    model, inputs = FAMILIES["bert"](0)
    name = "bert.encoder.layer.0.attention.self"
    short = keep_all(find_sites(model, inputs)).masked({name: BlockMask(np.ones((4, 5, 5), np.bool_))})
    with pytest.raises(InputError) as error, masked(model, short):
        model(**inputs)
    assert error.value.code is ErrorCode.TOO_LONG
    assert error.value.details == {"site": name, "actual": (7, 7, 0), "maximum": (5, 5, 0)}


def test_rows_without_a_key_are_zero_in_half_precision(tmp_path: Path) -> None:
    """Scores far below zero, masked in a graph that stays dense: half precision has no number below its lowest."""
    model, inputs = one_layer("bert")
    sites = find_sites(model, inputs)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "query.bias" in name or "key.bias" in name:
                weight.copy_(torch.tensor(5.0 if "query" in name else -5.0))
    kept = np.ones((sites[0].heads, 2, 2), np.bool_)
    kept[:, 1, 1] = False
    plan = keep_all(sites).masked({sites[0].name: BlockMask(kept, 8)})
    inputs = text(2, 16)
    inputs["attention_mask"][1, :8] = 0  # the second block of queries may attend to the first block of keys only
    path = tmp_path / "graph.onnx"
    export_reference(model, plan, inputs, path)
    feeds = [{name: value.numpy() for name, value in inputs.items()}]
    (expected,) = run(path, feeds)
    with torch.no_grad(), gated(model, plan):
        logits = model(**inputs).logits.numpy()
    assert relative_error([[logits]], [expected[:1]]) <= 1e-4
    save(ReducePrecision()(load(path)).model, path)
    (outputs,) = run(path, feeds)
    assert np.isfinite(outputs[0]).all()
    assert relative_error([expected[:1]], [outputs[:1]]) <= 2e-2
