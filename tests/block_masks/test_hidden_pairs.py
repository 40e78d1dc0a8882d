"""Pairs of positions that the model's own mask hides are outside the population of attention pruning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MistralConfig,
    MistralForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedModel,
)

from compressor.block_masks.attention_maps import build_masks, collect_attention_maps, density
from compressor.units import keep_all
from tests.block_masks.maps import plan_of, random_maps
from tests.selection import tiny

LENGTH, WINDOW = 12, 4
DISTANCE = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def mistral() -> PreTrainedModel:
    """Every layer attends to the last four tokens."""
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=WINDOW, bos_token_id=1, eos_token_id=2)
    return MistralForSequenceClassification(config)


def modern_bert() -> PreTrainedModel:
    """The first layer attends to all tokens, the second one to two tokens on each side."""
    tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    config = ModernBertConfig(
        **SIZES, **tokens, local_attention=WINDOW, layer_types=["full_attention", "sliding_attention"]
    )
    return ModernBertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("model", "usable"),
    [
        (mistral(), [(DISTANCE >= 0) & (DISTANCE < WINDOW)] * 2),
        (modern_bert(), [abs(DISTANCE) < LENGTH, abs(DISTANCE) <= WINDOW // 2]),
    ],
    ids=["mistral", "modern-bert"],
)
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_every_layer_loses_the_share_of_the_pairs_in_its_window(
    model: PreTrainedModel, usable: list[np.ndarray], share: float
) -> None:
    torch.manual_seed(0)
    sites = tiny.sites_of(model)
    lengths = [12, 12, 8]
    ids = [[*range(1, length + 1)] for length in lengths]
    rows = Dataset.from_dict({"input_ids": ids, "labels": [0, 1, 0], "length": lengths})
    maps = collect_attention_maps(model, sites, replace(tiny.data(), train=rows), keep_all(sites), length=LENGTH)
    masks = build_masks(maps, keep_all(sites), {site.kind: share for site in sites}, 1)
    for site, pairs in zip(sites, usable, strict=True):
        np.testing.assert_array_equal(maps.hidden[site.name], ~pairs)
        population, kept = site.heads * int(pairs.sum()), masks[site.name].kept
        assert not (kept & ~pairs).any()
        assert int(kept.sum()) == population - round(share * population)
        assert density(masks[site.name], maps, site.name, (0, 1, 2, 3)).mean() == pytest.approx(1 - share, abs=0.01)


def test_the_option_for_reproducing_the_paper_counts_hidden_pairs() -> None:
    maps = replace(random_maps(heads=1, length=LENGTH), hidden={"a": abs(DISTANCE) >= WINDOW})
    maps.maps["a"][:, abs(DISTANCE) >= WINDOW] = 0.0
    mask = build_masks(maps, plan_of(heads=1, kept=(0,)), {"bidirectional": 0.5}, 1, count_causal_zeros=True)["a"]
    np.testing.assert_array_equal(mask.kept[0], abs(DISTANCE) < WINDOW, "the share is spent on hidden pairs")


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0.01, 0.9), block=st.sampled_from([1, 8]), seed=st.integers(0, 99), is_random=st.booleans())
def test_exactly_the_share_of_the_visible_blocks_is_dropped(
    share: float, block: int, seed: int, is_random: bool
) -> None:
    length = 24
    hidden = np.random.default_rng(seed).random((length, length)) < 0.5
    hidden[8:16, :8] = True
    maps = replace(random_maps(length=length, seed=seed), hidden={"a": hidden})
    order = seed if is_random else None
    mask = build_masks(maps, plan_of(), {"bidirectional": share}, block, seed=order, allow_empty_rows=True)["a"]
    blocks = length // block
    visible = (~hidden).reshape(blocks, block, blocks, block).any(axis=(1, 3))
    population = 3 * int(visible.sum())
    assert not (mask.kept & ~visible).any()
    assert int(mask.kept.sum()) == population - round(share * population)
