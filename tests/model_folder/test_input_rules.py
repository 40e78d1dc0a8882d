"""Inputs of families that read patches, time series or embeddings: the models run on them at any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.families_tiny import tiny_model
from compressor.errors import ErrorCode
from compressor.model_folder import ModelFolder, example_inputs
from tests.faults import fails_with


def folder_of(family: str) -> ModelFolder:
    model = tiny_model(family)
    return ModelFolder(Path(family), model, None, model.config, "", "feature-extraction", family)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("siglip2_vision_model", {"pixel_values", "pixel_attention_mask", "spatial_shapes"}),
        ("siglip2", {"pixel_values", "pixel_attention_mask", "spatial_shapes"}),
        (
            "time_series_transformer",
            {"past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features"},
        ),
        ("patchtst", {"past_values"}),
        ("flava_multimodal_model", {"hidden_states"}),
        ("canine", {"input_ids", "attention_mask", "token_type_ids"}),
        ("xlnet", {"input_ids", "attention_mask"}),
        ("blip-2", {"pixel_values", "input_ids", "attention_mask"}),
        ("kosmos-2", {"pixel_values", "input_ids", "attention_mask", "image_embeds_position_mask"}),
        ("kosmos-2.5", {"input_ids", "attention_mask"}),
        ("instructblip", {"pixel_values", "input_ids", "attention_mask", "qformer_input_ids"}),
    ],
)
def test_the_model_runs_on_inputs_of_any_size(family: str, names: set[str]) -> None:
    folder = folder_of(family)
    for batch, seq in ((2, 8), (3, 13)):
        inputs = example_inputs(folder, batch, seq)
        assert set(inputs) == names
        with torch.no_grad():
            assert torch.isfinite(next(iter(folder.model(**inputs).values()))).all()
    assert all(torch.equal(value, inputs[name]) for name, value in example_inputs(folder, 3, 13).items())


@pytest.mark.parametrize(("family", "name"), [("decision_transformer", "states"), ("qwen2_vl_vision", "grid_thw")])
def test_an_input_that_no_rule_makes_up_is_named(family: str, name: str) -> None:
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, input=name):
        example_inputs(folder_of(family), 2, 8)
