"""Methods choose among heads outside the attention interface as among all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from compressor.selection.pruners.reconstruct.pruner import ReconstructPruner
from tests.projection_zoo import FAMILIES
from tests.selection import tiny
from tests.selection.pruners.pruning import (
    check_dropped_units_have_no_effect,
    check_kept_counts,
    pruning_inputs,
    ranked,
)


@pytest.mark.parametrize("method", ["dsp", pytest.param("taylor", marks=pytest.mark.zoo)])
def test_exactly_as_many_heads_are_kept_as_requested(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 16,
    }
    config = hf.MegatronBertConfig(vocab_size=20, max_position_embeddings=20, **sizes)
    model = hf.MegatronBertForSequenceClassification(config)
    learned = tiny.learn_plan(tmp_path, tiny.selection(method=method), model)
    assert [site.name for site in learned.plan.sites] == [
        f"bert.encoder.layer.{n}.attention.output.dense" for n in (0, 1)
    ]
    assert learned.plan.heads_kept == 3


@pytest.mark.parametrize("name", ["mpnet", "falcon"])
def test_the_other_weights_are_refitted(name: str, tmp_path: Path) -> None:
    pruner = ranked(ReconstructPruner, pruning_inputs(FAMILIES[name].model(), tmp_path))
    check_kept_counts(pruner)
    check_dropped_units_have_no_effect(pruner)
