"""The language models with memory: what they compute, what they count, what they refuse, and how they shrink."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from compressor import model_folder
from compressor.errors import InputError
from compressor.models import (
    AllAttentionConfig,
    AllAttentionForCausalLM,
    SegmentForCausalLM,
    TransformerXLConfig,
    TransformerXLForCausalLM,
    pruned,
)
from compressor.segment_memory import memory_names, new_memory_names
from compressor.units import Attention, find_sites, gated, hooked, keep_all
from graph_passes import BlockMask, Plan
from tests.zoo import random_plan

SHARE, REST = 426112, 1536  # of a head and of a layer at d = 512, H = 8, N = 2048
SMALL: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "memory_length": 6,
    "max_position_embeddings": 40,
}


def all_attention(seed: int = 0, **more: Any) -> AllAttentionForCausalLM:
    return _random(AllAttentionForCausalLM, AllAttentionConfig(**{**SMALL, "num_persistent": 5, **more}), seed)


def transformer_xl(seed: int = 0, **more: Any) -> TransformerXLForCausalLM:
    return _random(TransformerXLForCausalLM, TransformerXLConfig(**{**SMALL, **more}), seed)


def _random(cls: type, config: Any, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "persistent" not in name:
                torch.nn.init.normal_(parameter, std=0.3)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    return model


BOTH = pytest.mark.parametrize("make", [all_attention, transformer_xl])


def ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def sites(model: SegmentForCausalLM) -> list[Any]:
    return find_sites(model, {"input_ids": ids(2, 5)})


def stream(model: SegmentForCausalLM, text: Tensor, length: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits of a text read in segments, and the memories at its end."""
    memories: Any = None
    logits = []
    for segment in text.split(length, dim=1):
        out = model(segment, memories=memories)
        memories = out.memories
        logits.append(out.logits)
    return torch.cat(logits, dim=1), memories


# -- Size --------------------------------------------------------------------------------------------------------------

TABLES = [  # Shim et al., tables 1 and 2: layers, sparsity in percent, millions of parameters without embeddings
    (16, 0, 54.6),
    (16, 17.2, 45.2),
    (16, 32.8, 36.7),
    (16, 43.8, 30.7),
    (12, 0, 40.9),
    (12, 15.6, 34.5),
    (12, 27.1, 29.8),
    (12, 37.5, 25.6),
]


@pytest.mark.parametrize(("layers", "sparsity", "millions"), TABLES)
def test_the_papers_sizes(layers: int, sparsity: float, millions: float) -> None:
    left = round(layers * 8 * (1 - sparsity / 100))
    order = sorted((head, layer) for layer in range(layers) for head in range(8))[:left]
    kept = [[head for head, at in order if at == layer] for layer in range(layers)]
    with torch.device("meta"):
        model = AllAttentionForCausalLM(AllAttentionConfig(vocab_size=9, num_hidden_layers=layers, layer_heads=kept))
    size = sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert size == left * SHARE + REST * layers
    assert round(size / 1e6, 1) == millions


def test_a_transformer_xl_of_the_same_shape_is_as_large() -> None:
    with torch.device("meta"):
        model = TransformerXLForCausalLM(TransformerXLConfig(vocab_size=9))
    assert round(sum(parameter.numel() for parameter in model.model.layers.parameters()) / 1e6, 1) == 54.6


# -- What is computed --------------------------------------------------------------------------------------------------


def by_the_book(model: SegmentForCausalLM, text: Tensor, memories: list[np.ndarray]) -> np.ndarray:
    """Hidden states after the layers, in float64 and one query, head and key at a time."""
    weights = {name: value.double().numpy() for name, value in model.model.state_dict().items()}
    config = model.config
    d, w = config.hidden_size, config.head_dim or 0
    states = weights["embed_tokens.weight"][text.numpy()] * math.sqrt(d)

    def norm(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.layer_norm_eps)

    def encoding(distance: int) -> np.ndarray:
        angles = distance / 10000 ** (np.arange(0, d, 2) / d)
        return np.concatenate([np.sin(angles), np.cos(angles)])

    for layer in range(config.num_hidden_layers):
        at = {name.split("attention.")[1]: value for name, value in weights.items() if f"layers.{layer}.att" in name}
        past = memories[layer].shape[1]
        added = np.zeros_like(states)
        for b, i, h in np.ndindex(states.shape[0], states.shape[1], config.num_attention_heads):
            rows = slice(h * w, (h + 1) * w)
            context = norm(np.concatenate([memories[layer][b], states[b]]))
            query = at["q_proj.weight"][rows] @ context[past + i]
            scores, values = [], []
            for j in range(i + past + 1):
                key = at["k_proj.weight"][rows] @ context[j]
                place = at["r_proj.weight"][rows] @ encoding(i + past - j)
                content = (query + at["content_bias"][h]) @ key
                scores.append((content + (query + at["position_bias"][h]) @ place) / math.sqrt(w))
                values.append(at["v_proj.weight"][rows] @ context[j])
            for n in range(getattr(config, "num_persistent", 0)):
                key = at["persistent_key"][h, n] * math.sqrt(w)
                scores.append((query + at["content_bias"][h]) @ key / math.sqrt(w))
                values.append(at["persistent_value"][h, n] * math.sqrt(config.num_persistent))
            share = np.exp(np.array(scores) - max(scores))
            added[b, i] += at["o_proj.weight"][:, rows] @ (share / share.sum() @ np.array(values))
        states = states + added + at["o_proj.bias"]
        if isinstance(model, TransformerXLForCausalLM):
            ff = [
                weights[f"layers.{layer}.feed_forward.{place}"]
                for place in ("1.weight", "1.bias", "4.weight", "4.bias")
            ]
            states = states + np.maximum(norm(states) @ ff[0].T + ff[1], 0) @ ff[2].T + ff[3]
    return norm(states)


@BOTH
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("past", [0, 4])
def test_the_paper_by_the_book(make: Any, attention: Attention, past: int) -> None:
    model = make(attn_implementation=attention)
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)):
        torch.nn.init.zeros_(norm.bias)
    memories = [torch.randn(2, past, 24, generator=torch.Generator().manual_seed(layer)) for layer in range(3)]
    expected = by_the_book(model, ids(2, 5), [memory.double().numpy() for memory in memories])
    with torch.no_grad(), hooked(model, lambda name, out: out, attention=attention):
        got = model.model(ids(2, 5), memories=memories).last_hidden_state.numpy()
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@BOTH
@pytest.mark.parametrize("length", [1, 3, 4])
def test_segments_equal_the_whole_where_memory_holds_it(make: Any, length: int) -> None:
    model = make(memory_length=12)
    with torch.no_grad():
        whole = model(ids(2, 12))
        logits, memories = stream(model, ids(2, 12), length)
    torch.testing.assert_close(logits, whole.logits, rtol=1e-4, atol=1e-5)
    for one, other in zip(memories, whole.memories, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize(("memory_length", "sizes"), [(6, [4, 6, 6]), (9, [4, 8, 9]), (3, [3, 3, 3]), (0, [0, 0, 0])])
def test_memory_is_the_last_positions_before_each_layer(make: Any, memory_length: int, sizes: list[int]) -> None:
    model = make(memory_length=memory_length)
    memories, past = None, torch.zeros(2, 0, 24)
    for segment, size in zip(ids(2, 12).split(4, dim=1), sizes, strict=True):
        memories = model(segment, memories=memories).memories
        past = torch.cat([past, model.model.embed_tokens(segment) * math.sqrt(24)], dim=1)
        assert [tuple(memory.shape) for memory in memories] == [(2, size, 24)] * 3
        torch.testing.assert_close(memories[0], past[:, past.shape[1] - size :])


@BOTH
def test_an_empty_memory_is_none(make: Any) -> None:
    model = make()
    empty = [torch.zeros(2, 0, 24)] * 3
    torch.testing.assert_close(model(ids(2, 5), memories=empty).logits, model(ids(2, 5)).logits)


@BOTH
def test_memories_may_be_given_and_taken_by_name(make: Any) -> None:
    model = make()
    memories = model(ids(2, 5)).memories
    named = model(ids(2, 4), **dict(zip(memory_names(3), memories, strict=True)))
    expected = model(ids(2, 4), memories=memories)
    assert list(named) == ["logits", *new_memory_names(3)]
    for one, other in zip(named.values(), (expected.logits, *expected.memories), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    with pytest.raises(InputError, match="memory_0 is missing beside memory_1; give one memory a layer"):
        model(ids(2, 4), memory_1=memories[1])


@BOTH
def test_no_gradient_flows_into_memory(make: Any) -> None:
    model = make()
    memories = model(ids(2, 5)).memories
    assert not any(memory.requires_grad for memory in memories)
    model(ids(2, 5, seed=1), memories=memories, labels=ids(2, 5, seed=1)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@BOTH
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_no_position_sees_a_later_one_nor_padding(make: Any, attention: Attention) -> None:
    model = make()
    text, other = ids(2, 7), ids(2, 7)
    other[:, 4] = (other[:, 4] + 1) % 29
    memories = model(ids(2, 5, seed=1)).memories
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[:, 4] = 0
    with torch.no_grad(), hooked(model, lambda name, out: out, attention=attention):
        one, two = (model(tokens, memories=memories).logits for tokens in (text, other))
        torch.testing.assert_close(one[:, :4], two[:, :4])
        assert (one[:, 4:] - two[:, 4:]).abs().amax(-1).min() > 1e-4
        one, two = (model(tokens, memories=memories, attention_mask=mask).logits for tokens in (text, other))
    torch.testing.assert_close(one[:, [0, 1, 2, 3, 5, 6]], two[:, [0, 1, 2, 3, 5, 6]])


def test_persistent_vectors_are_seen_by_every_query() -> None:
    maps: dict[str, Tensor] = {}
    model = all_attention()
    memories = model(ids(2, 6)).memories
    mask = torch.zeros(2, 4, dtype=torch.long)
    with torch.no_grad(), hooked(model, lambda _, out: out, attention="eager", on_weights=maps.__setitem__):
        model(ids(2, 4), memories=memories, attention_mask=mask)
    for seen in maps.values():
        assert seen.shape == (2, 4, 4, 6 + 4 + 5)
        assert seen[..., -5:].min() > 0
        assert seen[..., 6:10].max() == 0
        torch.testing.assert_close(seen.sum(-1), torch.ones(2, 4, 4))


@BOTH
def test_shift_labels_are_labels_shifted(make: Any) -> None:
    model, text = make(), ids(2, 6)
    after = torch.cat([text[:, 1:], torch.full((2, 1), -100)], dim=1)
    expected = torch.nn.functional.cross_entropy(model(text).logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    torch.testing.assert_close(model(text, labels=text).loss, expected)
    torch.testing.assert_close(model(text, shift_labels=after).loss, expected)


def test_persistent_vectors_begin_at_the_range_of_keys_and_values() -> None:
    model = AllAttentionForCausalLM(AllAttentionConfig(**{**SMALL, "num_persistent": 4000}))
    attention = model.model.layers[1].attention
    assert attention.persistent_key.std().item() == pytest.approx(6**-0.5, rel=0.02)
    assert attention.persistent_value.std().item() == pytest.approx(4000**-0.5, rel=0.02)


# -- One of transformers' families -------------------------------------------------------------------------------------


@BOTH
def test_saved_and_loaded_like_any_other(make: Any, tmp_path: Path) -> None:
    model = make(layer_heads=[[0, 2], [], [1, 2, 3]])
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    other = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(other) is type(model)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    torch.testing.assert_close(other(ids(2, 5)).logits, model(ids(2, 5)).logits, rtol=0, atol=0)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    assert type(AutoModel.from_pretrained(tmp_path)) is type(model.model)
    loaded = model_folder.load(tmp_path, needs_processor=False)
    assert (loaded.task, loaded.family) == ("causal-lm", model.config.model_type)
    assert type(loaded.model) is type(model)
    assert type(model_folder.load(tmp_path, task="causal-lm", needs_processor=False).model) is type(model)
    assert loaded.fingerprint == model_folder.fingerprint(model)


@BOTH
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_its_attention_is_found_with_and_without_memory(make: Any, attention: Attention) -> None:
    model = make()
    for memories in ((), model(ids(2, 4)).memories):
        named = dict(zip(memory_names(3), memories, strict=False))
        found = find_sites(model, {"input_ids": ids(2, 5), **named}, attention=attention)
        assert [site.name for site in found] == [f"model.layers.{layer}.attention" for layer in range(3)]
        assert {(site.kind, site.heads, site.kv_heads, site.head_dim) for site in found} == {("causal", 4, 4, 6)}


# -- Pruned ------------------------------------------------------------------------------------------------------------


def share(model: SegmentForCausalLM) -> int:
    """Parameters of one head."""
    config = model.config
    return int(config.head_dim or 0) * (5 * config.hidden_size + 2 + 2 * getattr(config, "num_persistent", 0))


def count(model: SegmentForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@BOTH
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_pruned_is_gated(make: Any, seed: int) -> None:
    model = make(seed % 3)
    plan = random_plan(sites(model), np.random.default_rng(seed))
    smaller = pruned(model, plan)
    assert smaller.config.layer_heads == [list(site.kept) for site in plan.sites]
    emptied = sum(not site.kept for site in plan.sites)
    assert count(model) - count(smaller) == (plan.heads - plan.heads_kept) * share(model) + 2 * 24 * emptied
    text = ids(2, 9, seed)
    with torch.no_grad():
        with gated(model, plan):
            expected, memories = stream(model, text, 3)
        got, others = stream(smaller, text, 3)
    for one, other in zip((expected, *memories), (got, *others), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4 * one.abs().max().item())


def test_pruned_again_keeps_the_original_ids(tmp_path: Path) -> None:
    model = all_attention()
    first = pruned(model, _keeping(sites(model), [(0, 2, 3), (), (1, 3)]))
    second = pruned(first, _keeping(sites(first), [(1, 2), (1,)]))
    assert second.config.layer_heads == [[2, 3], [], [3]]
    directly = pruned(model, _keeping(sites(model), [(2, 3), (), (3,)]))
    torch.testing.assert_close(second(ids(2, 5)).logits, directly(ids(2, 5)).logits, rtol=0, atol=0)
    assert second.lm_head.weight is second.model.embed_tokens.weight
    assert second.lm_head.weight is not model.lm_head.weight
    second.save_pretrained(tmp_path)
    again = AllAttentionForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids(2, 5)).logits, directly(ids(2, 5)).logits, rtol=0, atol=0)


def test_a_plan_of_another_model_is_refused() -> None:
    model = all_attention()
    plan = keep_all(sites(transformer_xl(num_attention_heads=2)))
    with pytest.raises(InputError, match=r"plan: model.layers.0.attention: heads is 2 there, 4 in the model"):
        pruned(model, plan)


def test_a_plan_with_masks_is_refused() -> None:
    model = all_attention()
    plan = keep_all(sites(model))
    name = plan.sites[0].name
    mask = BlockMask(np.ones((plan.sites[0].heads, 2, 2), dtype=bool), 8)
    with pytest.raises(InputError, match=f"masks blocks of {name}; weights alone cannot"):
        pruned(model, plan.masked({name: mask}))


def _keeping(found: list[Any], kept: list[tuple[int, ...]]) -> Plan:
    dense = keep_all(found).sites
    return Plan(sites=tuple(replace(site, kept=ids, scale=()) for site, ids in zip(dense, kept, strict=True)))


# -- Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "length", "message"),
    [
        ([(2, 3, 24)] * 2, 4, r"2 memories were given, the model has 3 layers"),
        ([(2, 3, 24), (2, 2, 24), (2, 3, 24)], 4, r"memory_1 is \[2, 2, 24\], not \[batch 2, length 3, hidden 24\]"),
        ([(1, 3, 24)] * 3, 4, r"memory_0 is \[1, 3, 24\], not \[batch 2"),
        ([(2, 3, 20)] * 3, 4, r"memory_0 is \[2, 3, 20\], not \[batch 2, length 3, hidden 24\]"),
        ([(2,)] * 3, 4, r"memory_0 is \[2\], not"),
        ([(2, 7, 24)] * 3, 4, r"memories hold 7 positions, the model keeps 6 \(memory_length\); give the last 6"),
        ([(2, 6, 24)] * 3, 35, r"6 positions of memory and 35 of the segment are more than the model's 40"),
        (None, 41, r"0 positions of memory and 41 of the segment are more than the model's 40"),
    ],
)
@BOTH
def test_what_does_not_fit_is_one_line(make: Any, shapes: Any, length: int, message: str) -> None:
    memories = None if shapes is None else [torch.zeros(shape) for shape in shapes]
    with pytest.raises(InputError, match=message) as caught:
        make()(ids(2, length), memories=memories)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"layer_heads": [[0], [1]]}, "layer_heads has 2 layers, the model 3"),
        ({"layer_heads": [[0], [1, 1], [2]]}, r"layer 1 lists \[1, 1\]; give ascending ids"),
        ({"layer_heads": [[0], [1], [4]]}, r"layer 2 lists \[4\]"),
        ({"memory_length": -1}, "memory_length is -1"),
        ({"num_persistent": -1}, "num_persistent is -1"),
        ({"hidden_size": 25}, "hidden_size 25 is odd"),
        ({"hidden_size": 0}, "hidden_size is 0; give 1 or more"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; give 1 or more"),
        ({"num_attention_heads": 7}, "hidden_size 24 cannot be divided among 7 heads; give a multiple"),
        ({"head_dim": 0}, "head_dim is 0; give 1 or more"),
        ({"attention_dropout": 1.0}, "attention_dropout is 1.0; give 0 or more, and less than 1"),
        ({"embedding_dropout": -0.1}, "embedding_dropout is -0.1"),
        ({"hidden_dropout": float("nan")}, "hidden_dropout is nan"),
        ({"memory_length": 40}, "memory_length 40 leaves a segment none of the 40 positions"),
    ],
)
def test_a_configuration_that_cannot_be_is_one_line(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        AllAttentionConfig(**{**SMALL, **entry})
    assert "\n" not in str(caught.value)


def test_heads_need_not_divide_the_width_where_theirs_is_given(tmp_path: Path) -> None:
    model = all_attention(num_attention_heads=7, head_dim=4)
    assert model(ids(2, 5)).logits.shape == (2, 5, 29)
    model.config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).head_dim == 4


def test_a_folder_with_such_a_configuration_is_refused_in_one_line(tmp_path: Path) -> None:
    all_attention().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 0'))
    with pytest.raises(InputError, match=r"cannot be used \(num_attention_heads is 0; give 1 or more\)"):
        model_folder.load(tmp_path, needs_processor=False)
