"""Impossible configurations are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from compressor import model_folder
from compressor.errors import ErrorCode
from compressor.models import AllAttentionConfig
from tests.faults import fails_with
from tests.targets.segment_models import SIZES, segment_model, token_ids

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
