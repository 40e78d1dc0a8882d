"""BigBird's block-sparse attention as a mask: the function of the model, wherever the padding is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf

from compressor.models.block_sparse import attend_by_masks
from tests.run.length_models import spread

FULL_LENGTH = 36
"""Tokens up to which all positions are visible: `(5 + 2 * 2) * 4`."""


@pytest.fixture(scope="module")
def model() -> Any:
    config = hf.BigBirdConfig(
        vocab_size=25,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
        max_position_embeddings=96,
        block_size=4,
        num_random_blocks=2,
        attention_type="block_sparse",
    )
    return spread(hf.BigBirdForSequenceClassification(config))


@pytest.mark.parametrize("length", [FULL_LENGTH, FULL_LENGTH + 1, 40, 61])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_the_mask_is_the_function_of_the_blocks(model: Any, length: int, padding: str) -> None:
    masked = copy.deepcopy(model)
    assert len(attend_by_masks(masked)) == 1
    ids = torch.randint(5, 25, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[1, slice(length // 2, None) if padding == "right" else slice(length // 2)] = 0
    with torch.no_grad():
        expected = copy.deepcopy(model)(input_ids=ids, attention_mask=mask).logits
        logits = masked(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
