"""The language models with segment memory: their size, their outputs, and their use as models of transformers."""

from __future__ import annotations

import math
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
from compressor.errors import ErrorCode
from compressor.models import (
    AllAttentionConfig,
    AllAttentionForCausalLM,
    SegmentForCausalLM,
    TransformerXLConfig,
    TransformerXLForCausalLM,
    pruned,
)
from compressor.segment_memory import memory_names, new_memory_names
from compressor.units import Attention, Site, find_groups, find_sites, gated, hooked, keep_all
from graph_passes import BlockMask
from tests.faults import fails_with
from tests.models.reference import hidden_states, read_in_segments
from tests.random_plans import random_plan
from tests.targets.segment_models import FAMILIES, SIZES, head_parameters, plan_of, segment_model, token_ids

WIDTH = SIZES["hidden_size"]
HEAD, LAYER = 426112, 1536
"""Parameters of a head, and of a layer without heads, at d = 512, H = 8, N = 2048."""

BOTH = pytest.mark.parametrize("family", FAMILIES)


def model_of(family: str, **fields: Any) -> SegmentForCausalLM:
    """A model of three layers of four heads."""
    return segment_model(family, **{"num_hidden_layers": 3, **fields})


# Size

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
def test_sizes_match_the_paper(layers: int, sparsity: float, millions: float) -> None:
    heads = round(layers * 8 * (1 - sparsity / 100))
    order = sorted((head, layer) for layer in range(layers) for head in range(8))[:heads]
    kept = [[head for head, head_layer in order if head_layer == layer] for layer in range(layers)]
    with torch.device("meta"):
        model = AllAttentionForCausalLM(AllAttentionConfig(vocab_size=9, num_hidden_layers=layers, layer_heads=kept))
    size = sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert size == heads * HEAD + LAYER * layers
    assert round(size / 1e6, 1) == millions


def test_a_transformer_xl_of_the_same_shape_is_as_large() -> None:
    with torch.device("meta"):
        model = TransformerXLForCausalLM(TransformerXLConfig(vocab_size=9))
    assert round(sum(parameter.numel() for parameter in model.model.layers.parameters()) / 1e6, 1) == 54.6


# Outputs


@BOTH
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("past", [0, 4])
def test_hidden_states_match_the_equations(family: str, attention: Attention, past: int) -> None:
    model = model_of(family, attn_implementation=attention)
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)):
        torch.nn.init.zeros_(norm.bias)
    memories = [torch.randn(2, past, WIDTH, generator=torch.Generator().manual_seed(layer)) for layer in range(3)]
    expected = hidden_states(model, token_ids(2, 5), [memory.double().numpy() for memory in memories])
    with torch.no_grad(), hooked(model, lambda name, out: out, attention=attention):
        states = model.model(token_ids(2, 5), memories=memories).last_hidden_state.numpy()
    assert np.abs(states - expected).max() <= 1e-4 * np.abs(expected).max()


@BOTH
@pytest.mark.parametrize("length", [1, 3, 4])
def test_segments_equal_the_whole_text_if_memory_holds_it(family: str, length: int) -> None:
    model = model_of(family, memory_length=12)
    with torch.no_grad():
        whole: Any = model(token_ids(2, 12))
        logits, memories = read_in_segments(model, token_ids(2, 12), length)
    torch.testing.assert_close(logits, whole.logits, rtol=1e-4, atol=1e-5)
    for memory, expected in zip(memories, whole.memories, strict=True):
        torch.testing.assert_close(memory, expected, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize(("memory_length", "sizes"), [(6, [4, 6, 6]), (9, [4, 8, 9]), (3, [3, 3, 3]), (0, [0, 0, 0])])
def test_memory_is_the_last_positions_before_each_layer(family: str, memory_length: int, sizes: list[int]) -> None:
    model: Any = model_of(family, memory_length=memory_length)
    memories, past = None, torch.zeros(2, 0, WIDTH)
    for segment, size in zip(token_ids(2, 12).split(4, dim=1), sizes, strict=True):
        memories = model(segment, memories=memories).memories
        past = torch.cat([past, model.model.embed_tokens(segment) * math.sqrt(WIDTH)], dim=1)
        assert [tuple(memory.shape) for memory in memories] == [(2, size, WIDTH)] * 3
        torch.testing.assert_close(memories[0], past[:, past.shape[1] - size :])


@BOTH
def test_an_empty_memory_equals_none(family: str) -> None:
    model: Any = model_of(family)
    empty = [torch.zeros(2, 0, WIDTH)] * 3
    torch.testing.assert_close(model(token_ids(2, 5), memories=empty).logits, model(token_ids(2, 5)).logits)


@BOTH
def test_memories_may_be_passed_by_name(family: str) -> None:
    model: Any = model_of(family)
    memories = model(token_ids(2, 5)).memories
    outputs = model(token_ids(2, 4), **dict(zip(memory_names(3), memories, strict=True)))
    expected = model(token_ids(2, 4), memories=memories)
    assert list(outputs) == ["logits", *new_memory_names(3)]
    for output, tensor in zip(outputs.values(), (expected.logits, *expected.memories), strict=True):
        torch.testing.assert_close(output, tensor, rtol=0, atol=0)
    with fails_with(ErrorCode.TENSOR_MISMATCH, tensor="memory_0"):
        model(token_ids(2, 4), memory_1=memories[1])


@BOTH
def test_no_gradient_flows_into_memory(family: str) -> None:
    model: Any = model_of(family)
    memories = model(token_ids(2, 5)).memories
    assert not any(memory.requires_grad for memory in memories)
    model(token_ids(2, 5, seed=1), memories=memories, labels=token_ids(2, 5, seed=1)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@BOTH
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_no_position_attends_to_a_later_one_or_to_padding(family: str, attention: Attention) -> None:
    model: Any = model_of(family)
    text, changed = token_ids(2, 7), token_ids(2, 7)
    changed[:, 4] = (changed[:, 4] + 1) % SIZES["vocab_size"]
    memories = model(token_ids(2, 5, seed=1)).memories
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[:, 4] = 0
    with torch.no_grad(), hooked(model, lambda name, out: out, attention=attention):
        before, after = (model(tokens, memories=memories).logits for tokens in (text, changed))
        torch.testing.assert_close(before[:, :4], after[:, :4])
        assert (before[:, 4:] - after[:, 4:]).abs().amax(-1).min() > 1e-4
        before, after = (model(tokens, memories=memories, attention_mask=mask).logits for tokens in (text, changed))
    torch.testing.assert_close(before[:, [0, 1, 2, 3, 5, 6]], after[:, [0, 1, 2, 3, 5, 6]])


def test_every_query_attends_to_persistent_vectors() -> None:
    maps: dict[str, Tensor] = {}
    model: Any = model_of("all_attention")
    memories = model(token_ids(2, 6)).memories
    mask = torch.zeros(2, 4, dtype=torch.long)
    with (
        torch.no_grad(),
        hooked(
            model,
            lambda _, out: out,
            attention="eager",
            on_weights=lambda call, weights: maps.update({call.site: weights}),
        ),
    ):
        model(token_ids(2, 4), memories=memories, attention_mask=mask)
    assert len(maps) == 3
    for weights in maps.values():
        assert weights.shape == (2, 4, 4, 6 + 4 + 5)
        assert weights[..., -5:].min() > 0
        assert weights[..., 6:10].max() == 0
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 4))


@BOTH
def test_shift_labels_are_shifted_labels(family: str) -> None:
    model: Any = model_of(family)
    text = token_ids(2, 6)
    following = torch.cat([text[:, 1:], torch.full((2, 1), -100)], dim=1)
    expected = torch.nn.functional.cross_entropy(model(text).logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    torch.testing.assert_close(model(text, labels=text).loss, expected)
    torch.testing.assert_close(model(text, shift_labels=following).loss, expected)


def test_persistent_vectors_start_at_the_scale_of_keys_and_values() -> None:
    sizes = {**SIZES, "num_hidden_layers": 3, "num_persistent": 4000}
    attention: Any = AllAttentionForCausalLM(AllAttentionConfig(**sizes)).model.layers[1].attention
    assert attention.persistent_key.std().item() == pytest.approx(6**-0.5, rel=0.02)
    assert attention.persistent_value.std().item() == pytest.approx(4000**-0.5, rel=0.02)


@pytest.mark.parametrize(
    ("shapes", "length", "details"),
    [
        ([(2, 3, 24)] * 2, 4, {"memories": 2, "layers": 3}),
        ([(2, 3, 24), (2, 2, 24), (2, 3, 24)], 4, {"tensor": "memory_1", "shape": (2, 2, 24), "expected": (2, 3, 24)}),
        ([(1, 3, 24)] * 3, 4, {"tensor": "memory_0", "shape": (1, 3, 24), "expected": (2, 3, 24)}),
        ([(2, 3, 20)] * 3, 4, {"tensor": "memory_0", "shape": (2, 3, 20), "expected": (2, 3, 24)}),
        ([(2,)] * 3, 4, {"tensor": "memory_0", "shape": (2,)}),
    ],
)
@BOTH
def test_memories_of_other_shapes_are_refused(family: str, shapes: Any, length: int, details: dict[str, Any]) -> None:
    with fails_with(ErrorCode.TENSOR_MISMATCH, **details):
        model_of(family)(token_ids(2, length), memories=[torch.zeros(shape) for shape in shapes])


@pytest.mark.parametrize(
    ("past", "length", "details"),
    [
        (7, 4, {"field": "memory_length", "value": 7, "maximum": 6}),
        (6, 35, {"field": "max_positions", "value": 41, "maximum": 40}),
        (None, 41, {"field": "max_positions", "value": 41, "maximum": 40}),
    ],
)
@BOTH
def test_too_many_positions_are_refused(family: str, past: int | None, length: int, details: dict[str, Any]) -> None:
    memories = None if past is None else [torch.zeros(2, past, WIDTH)] * 3
    with fails_with(ErrorCode.OUT_OF_RANGE, **details):
        model_of(family)(token_ids(2, length), memories=memories)


# Use as a model of transformers


@BOTH
def test_a_model_is_saved_and_loaded_like_any_other(family: str, tmp_path: Path) -> None:
    model: Any = model_of(family, layer_heads=[[0, 2], [], [1, 2, 3]])
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(loaded(token_ids(2, 5)).logits, model(token_ids(2, 5)).logits, rtol=0, atol=0)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    assert type(AutoModel.from_pretrained(tmp_path)) is type(model.model)
    folder = model_folder.load(tmp_path, needs_processor=False)
    assert (folder.task, folder.family) == ("causal-lm", model.config.model_type)
    assert type(folder.model) is type(model)
    assert type(model_folder.load(tmp_path, task="causal-lm", needs_processor=False).model) is type(model)
    assert folder.fingerprint == model_folder.fingerprint(model)


@BOTH
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sites_are_found_with_and_without_memory(family: str, attention: Attention) -> None:
    model: Any = model_of(family)
    for memories in ((), model(token_ids(2, 4)).memories):
        named_memories = dict(zip(memory_names(3), memories, strict=False))
        sites = find_sites(model, {"input_ids": token_ids(2, 5), **named_memories}, attention=attention)
        assert [site.name for site in sites] == [f"model.layers.{layer}.attention" for layer in range(3)]
        assert {(site.kind, site.heads, site.kv_heads, site.head_dim) for site in sites} == {("causal", 4, 4, 6)}


MODELS = {family: segment_model(family, num_hidden_layers=3) for family in FAMILIES}


def sites_of(model: SegmentForCausalLM) -> list[Site]:
    return find_sites(model, {"input_ids": token_ids(2, 5)})


def parameters(model: SegmentForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, deadline=None)
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


THREE_LAYERS = {**SIZES, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("field", "value", "code", "details"),
    [
        ("layer_heads", [[0], [1]], ErrorCode.CONTRADICTION, {"layers": 2}),
        ("layer_heads", [[0], [1, 1], [2]], ErrorCode.INVALID_VALUE, {"layer": 1, "value": [1, 1]}),
        ("layer_heads", [[0], [1], [4]], ErrorCode.INVALID_VALUE, {"layer": 2, "value": [4]}),
        ("memory_length", -1, ErrorCode.OUT_OF_RANGE, {"value": -1}),
        ("num_persistent", -1, ErrorCode.OUT_OF_RANGE, {"value": -1}),
        ("hidden_size", 25, ErrorCode.OUT_OF_RANGE, {"value": 25}),
        ("hidden_size", 0, ErrorCode.OUT_OF_RANGE, {"value": 0}),
        ("num_attention_heads", 0, ErrorCode.OUT_OF_RANGE, {"value": 0}),
        ("head_dim", 0, ErrorCode.OUT_OF_RANGE, {"value": 0}),
        ("attention_dropout", 1.0, ErrorCode.OUT_OF_RANGE, {"value": 1.0}),
        ("embedding_dropout", -0.1, ErrorCode.OUT_OF_RANGE, {"value": -0.1}),
        ("hidden_dropout", float("nan"), ErrorCode.OUT_OF_RANGE, {}),
        ("memory_length", 40, ErrorCode.CONTRADICTION, {"value": 40, "positions": 40}),
    ],
)
def test_an_impossible_field_is_refused(field: str, value: Any, code: ErrorCode, details: dict[str, Any]) -> None:
    with fails_with(code, field=field, **details):
        AllAttentionConfig(**{**THREE_LAYERS, field: value})


def test_heads_must_divide_the_width_unless_their_width_is_given(tmp_path: Path) -> None:
    with fails_with(ErrorCode.CONTRADICTION, field="hidden_size", value=24, heads=7):
        AllAttentionConfig(**{**SIZES, "num_attention_heads": 7})
    model = segment_model("all_attention", num_attention_heads=7, head_dim=4)
    assert model(token_ids(2, 5)).logits.shape == (2, 5, 29)
    model.config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).head_dim == 4


def test_a_folder_with_an_impossible_configuration_is_refused(tmp_path: Path) -> None:
    segment_model("all_attention").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 0'))
    reason = "num_attention_heads is 0; give 1 or more"
    with fails_with(ErrorCode.FILE_UNREADABLE, path=file, reason=reason):
        model_folder.load(tmp_path, needs_processor=False)
