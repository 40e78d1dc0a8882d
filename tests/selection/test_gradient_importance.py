"""The importance of heads is the mean over rows, however rows are batched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from compressor.selection.subset_evaluator import sensitivity
from compressor.units import find_sites

SIZES: dict[str, Any] = {
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 12,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "num_labels": 3,
}


@pytest.mark.parametrize("model_class", [hf.GPT2ForTokenClassification, hf.GPT2LMHeadModel])
def test_rows_count_alike_whatever_the_number_of_their_labels(model_class: type[PreTrainedModel]) -> None:
    """Labels of tokens are not shifted, so that that of the first token counts; those of a language model are."""
    torch.manual_seed(0)
    model = model_class(hf.GPT2Config(**SIZES)).eval()
    ids = torch.randint(2, 12, (3, 6))
    labels = torch.randint(0, 3, (3, 6))
    labels[1, 2:] = labels[2, 4:] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    sites = find_sites(model, {name: batch[name] for name in ("input_ids", "attention_mask")})
    heads = torch.ones(sum(site.heads for site in sites), dtype=torch.bool)
    rows = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(3)]
    together, apart = sensitivity(model, sites, heads, [batch]), sensitivity(model, sites, heads, rows)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-9)
