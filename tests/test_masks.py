"""Block masks in PyTorch and in the exported graph: what is left out, what stays, and what may never be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import InputError
from compressor.export import export_reference
from compressor.units import Attention, Site, find_sites, gated, hooked, keep_all, masked
from graph_passes import BlockMask, Plan
from graph_passes.passes.fp16 import halve
from tests.test_law import relative_error, run
from tests.zoo import FAMILIES, text

LONGEST = 40


def draw(site: Site, model: PreTrainedModel, seed: int, block: int = 1, share: float = 0.4) -> BlockMask:
    """A random mask; the second head's first row and the third head are left without a block."""
    memory = getattr(model.config, "memory_length", 0)
    blocks = -(-LONGEST // block), -(-(LONGEST + memory) // block)
    kept = np.random.default_rng(seed).random((site.heads, *blocks)) < share
    kept[1 % site.heads, 0] = False
    kept[2 % site.heads] = False
    return BlockMask(kept, block, memory)


def maps(model: PreTrainedModel, inputs: dict[str, Tensor], plan: Plan) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each site's map and its output as the projection gets it."""
    weights, outputs = dict[str, Tensor](), dict[str, Tensor]()

    def keep(name: str, out: Tensor) -> Tensor:
        outputs.setdefault(name, out)
        return out

    def see(name: str, found: Tensor) -> None:
        weights.setdefault(name, found)

    with (
        torch.no_grad(),
        masked(model, plan, attention="eager"),
        hooked(model, keep, attention="eager", on_weights=see),
    ):
        model(**inputs)
    return weights, outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_masked_map_is_the_map_over_the_pairs_that_are_left(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    model.eval()
    sites = find_sites(model, inputs)
    whole = keep_all(sites)
    before, _ = maps(model, inputs, whole)
    for kind in {site.kind for site in sites}:
        site = next(site for site in sites if site.kind == kind)
        mask = draw(site, model, seed=1)
        after, outputs = maps(model, inputs, whole.masked({site.name: mask}))
        module = model.get_submodule(site.name)
        free = getattr(module, "persistent", 0)
        queries, keys = before[site.name].shape[2:]
        memory = keys - free - queries if mask.memory else 0
        allowed = np.pad(
            mask.entries(queries, keys - free, memory=memory), ((0, 0), (0, 0), (0, free)), constant_values=True
        )
        left = before[site.name] * torch.from_numpy(allowed)
        total = left.sum(-1, keepdim=True)
        alive = total[..., 0] > 0
        assert torch.allclose(after[site.name][alive], (left / total)[alive], atol=1e-5)
        assert not outputs[site.name].transpose(1, 2)[~alive].any()
        assert bool(alive.any())
        assert free or not bool(alive.all())


@pytest.mark.parametrize(
    ("family", "opset", "attention"),
    [
        ("bert", 18, "eager"),
        ("gpt2", 18, "sdpa"),
        ("llama", 23, "sdpa"),
        ("bart", 18, "eager"),
        ("t5", 23, "eager"),
        ("all_attention", 18, "eager"),
    ],
)
def test_the_graph_holds_the_masks_and_computes_the_same(
    family: str, opset: int, attention: Attention, tmp_path: Path
) -> None:
    model, inputs = FAMILIES[family](0)
    model.eval()
    sites = find_sites(model, inputs, attention=attention)
    plan = keep_all(sites).masked({site.name: draw(site, model, seed, block=8) for seed, site in enumerate(sites)})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    export_reference(model, plan, inputs, tmp_path / "graph.onnx", opset=opset, attention=attention)
    with torch.no_grad(), gated(model, plan, attention=attention):
        expected = model(**inputs).logits.numpy()
    found = run(tmp_path / "graph.onnx", [{name: value.numpy() for name, value in inputs.items()}])
    assert relative_error([[expected]], [found[0][:1]]) <= 1e-4
    assert not any(hasattr(model.get_submodule(site.name), "block_mask") for site in sites)


@pytest.mark.parametrize("family", ["gpt2", "llama", "all_attention", "bart"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_pair_left_out_never_lets_the_future_in(family: str, attention: Attention) -> None:
    model, inputs = FAMILIES[family](0)
    model.eval()
    sites = find_sites(model, inputs)
    masks = {site.name: draw(site, model, seed, share=0.2) for seed, site in enumerate(sites) if site.kind == "causal"}
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    other = {**inputs, name: inputs[name].clone()}
    other[name][:, 3:] = 9
    with torch.no_grad(), gated(model, keep_all(sites).masked(masks), attention=attention):
        one, two = model(**inputs).logits, model(**other).logits
    assert torch.equal(one[:, :3], two[:, :3])
    assert not torch.equal(one[:, 3:], two[:, 3:])


@pytest.mark.parametrize("family", ["llama", "bart", "t5"])
def test_queries_are_the_last_positions_where_keys_are_kept_from_earlier_calls(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    model.eval()
    sites = find_sites(model, inputs)
    plan = keep_all(sites).masked({site.name: draw(site, model, 3, share=0.6) for site in sites})
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids = inputs.pop(name)
    read: dict[str, Any] = {name: inputs[name] for name in ("input_ids", "attention_mask") if "input_ids" in inputs}
    with torch.no_grad(), gated(model, plan):
        whole = model(**read, **{name: ids}).logits
        begun = model(**read, **{name: ids[:, :4]}, use_cache=True)
        if read:  # between the decoder's calls there are none of the encoder
            read = {"attention_mask": read["attention_mask"], "encoder_outputs": (begun.encoder_last_hidden_state,)}
        rest = model(**read, **{name: ids[:, 4:]}, past_key_values=begun.past_key_values).logits
    assert torch.allclose(whole[:, 4:], rest, atol=1e-5)


@pytest.mark.parametrize("kind", ["all", "window", "static"])
def test_every_cache_aligns_queries_and_keys(kind: str) -> None:
    """Token by token, where the cache holds all keys, the last ones, or room for more than the mask reaches over."""
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
        whole = model(input_ids=ids).logits
        begun = model(input_ids=ids[:, :7], past_key_values=cache, use_cache=True)
        found, cache = [begun.logits], begun.past_key_values
        for at in range(7, 12):
            step = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            found.append(step.logits)
    assert torch.allclose(whole, torch.cat(found, dim=1), atol=1e-5)


def test_refuses_what_the_masks_do_not_reach_over() -> None:
    model, inputs = FAMILIES["bert"](0)
    sites = find_sites(model, inputs)
    name = sites[0].name
    short = keep_all(sites).masked({name: BlockMask(np.ones((4, 5, 5), np.bool_))})
    said = "7 queries and 7 keys after 0 remembered; the mask reaches over 5, 5 and 0"
    with pytest.raises(InputError, match=said), gated(model, short):
        model(**inputs)


def test_rows_without_a_key_are_zero_in_half_precision_too(tmp_path: Path) -> None:
    """Scores far below zero, hidden in a graph that stays dense: half precision has no number below its lowest."""
    model, inputs = FAMILIES["bert"](0)
    model.eval()
    sites = find_sites(model, inputs)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "query.bias" in name or "key.bias" in name:
                weight.copy_(torch.tensor(5.0 if "query" in name else -5.0))
    kept = np.ones((sites[0].heads, 2, 2), np.bool_)
    kept[:, 1, 1] = False
    plan = keep_all(sites).masked({sites[0].name: BlockMask(kept, 8)})
    inputs = text(2, 16)
    inputs["attention_mask"][1, :8] = 0  # the second block of queries may see the first block of keys alone
    export_reference(model, plan, inputs, tmp_path / "graph.onnx")
    feeds = [{name: value.numpy() for name, value in inputs.items()}]
    expected = run(tmp_path / "graph.onnx", feeds)
    halve(tmp_path / "graph.onnx")
    found = run(tmp_path / "graph.onnx", feeds)
    assert np.isfinite(found[0][0]).all()
    assert relative_error([expected[0][:1]], [found[0][:1]]) <= 2e-2
