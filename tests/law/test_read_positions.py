"""A classifier computes the positions that it reads, and what the model computes, at lengths up to the longest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from compressor.export import export_reference
from compressor.units import find_groups, keep_all
from graph_passes import load, shrink
from graph_passes.passes import DropUnreadPositions
from tests.law.outputs import run
from tests.law.references import write_graph
from tests.zoo import VOCABULARY, text

HEADS, HEAD_DIM, LONGEST = 4, 4, 512
SIZES = ((HEADS, HEADS), (1, 1), (16, 16), (3, 13), (2, 300), (1, LONGEST - 1), (2, LONGEST))
"""As many rows and positions as there are heads, which are as wide, and sizes that differ."""
PUBLISHED: dict[str, Any] = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "max_relative_positions": -1,
}
V3 = {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
CLASSIFIERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "v1": (hf.DebertaConfig, hf.DebertaForSequenceClassification, {}),
    "v2": (hf.DebertaV2Config, hf.DebertaV2ForSequenceClassification, {**V3, "conv_kernel_size": 3}),
    "v3": (hf.DebertaV2Config, hf.DebertaV2ForSequenceClassification, V3),
}


@pytest.mark.zoo
@pytest.mark.parametrize("version", CLASSIFIERS)
def test_positions_that_are_read_at_every_length(version: str, tmp_path: Path) -> None:
    config, model_class, more = CLASSIFIERS[version]
    width = HEADS * HEAD_DIM
    sizes = {"hidden_size": width, "pooler_hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    torch.manual_seed(0)
    model = model_class(
        config(
            vocab_size=VOCABULARY,
            intermediate_size=3 * width,
            max_position_embeddings=LONGEST,
            num_labels=3,
            pad_token_id=0,
            **sizes,
            **PUBLISHED,
            **more,
        )
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    inputs = text(2, 9)
    groups = find_groups(model, inputs, attention="eager")
    path = tmp_path / "reference.onnx"
    export_reference(model, keep_all(groups), inputs, path)
    result = DropUnreadPositions()(shrink(load(path), keep_all(groups)).model)
    assert result.report
    feeds = [{name: value.numpy() for name, value in text(batch, length).items()} for batch, length in SIZES]
    fresh = model_class(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = [
            [fresh(**{name: torch.from_numpy(value) for name, value in feed.items()}).logits.numpy()] for feed in feeds
        ]
    outputs = run(write_graph(result.model, f"read-{version}.onnx"), feeds)
    largest = max(np.abs(reference).max() for (reference,) in expected)
    for (batch, length), reference, output in zip(SIZES, expected, outputs, strict=True):
        assert np.abs(reference[0] - output[0]).max() <= 1e-4 * largest, (batch, length)
        assert np.isfinite(output[0]).all()
