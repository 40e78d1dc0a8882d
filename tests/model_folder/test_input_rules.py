"""Inputs of families that read patches, time series or embeddings: the models run on them at any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from benchmarks.families_tiny import tiny_model
from compressor.errors import ErrorCode
from compressor.model_folder import ModelFolder, example_inputs
from compressor.model_folder.input_rules import FEATURES, example_signal
from compressor.model_folder.processor import IMAGES
from tests.faults import fails_with
from tests.marks import mostly_zoo

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def videos() -> PreTrainedModel:
    return hf.VideoMAEModel(hf.VideoMAEConfig(**SIZES, image_size=8, patch_size=4, num_frames=2))


def pose() -> PreTrainedModel:
    backbone = hf.VitPoseBackboneConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=(16, 32),
        patch_size=(16, 16),
        mlp_ratio=1,
    )
    return hf.VitPoseForPoseEstimation(hf.VitPoseConfig(backbone_config=backbone))


def whisper() -> PreTrainedModel:
    sizes: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    return hf.WhisperForAudioClassification(hf.WhisperConfig(**sizes, num_mel_bins=10, max_source_positions=6))


def parakeet() -> PreTrainedModel:
    sizes: dict[str, Any] = {**SIZES, "num_mel_bins": 24, "subsampling_conv_channels": 4}
    return hf.ParakeetEncoder(hf.ParakeetEncoderConfig(**sizes))


CASES: dict[str, tuple[Callable[[], PreTrainedModel], str, tuple[int, ...]]] = {
    "videos": (videos, IMAGES, (3, 2, 3, 8, 8)),
    "images of a backbone": (pose, IMAGES, (3, 3, 16, 32)),
    "channels of frames": (whisper, FEATURES, (3, 10, 12)),
    "rows of frames": (parakeet, FEATURES, (3, 3000, 24)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_signal_has_the_shape_that_the_model_reads(name: str) -> None:
    build, signal, shape = CASES[name]
    model = build().eval()
    value = example_signal(signal, model, "feature-extraction", 3)
    assert tuple(value.shape) == shape
    with torch.no_grad():
        model(**{signal: value[:, :200] if name == "rows of frames" else value})


def folder_of(family: str) -> ModelFolder:
    model = tiny_model(family)
    return ModelFolder(Path(family), model, None, model.config, "", "feature-extraction", family)


SIZED: dict[str, set[str]] = {
    "siglip2_vision_model": {"pixel_values", "pixel_attention_mask", "spatial_shapes"},
    "siglip2": {"pixel_values", "pixel_attention_mask", "spatial_shapes"},
    "time_series_transformer": {
        "past_values",
        "past_time_features",
        "past_observed_mask",
        "future_values",
        "future_time_features",
    },
    "patchtst": {"past_values"},
    "flava_multimodal_model": {"hidden_states"},
    "canine": {"input_ids", "attention_mask", "token_type_ids"},
    "xlnet": {"input_ids", "attention_mask"},
    "blip-2": {"pixel_values", "input_ids", "attention_mask"},
    "kosmos-2": {"pixel_values", "input_ids", "attention_mask", "image_embeds_position_mask"},
    "kosmos-2.5": {"input_ids", "attention_mask"},
    "instructblip": {"pixel_values", "input_ids", "attention_mask", "qformer_input_ids"},
}
"""Family -> its inputs."""


@pytest.mark.parametrize("family", mostly_zoo(SIZED, "siglip2", "time_series_transformer", "kosmos-2"))
def test_the_model_runs_on_inputs_of_any_size(family: str) -> None:
    names = SIZED[family]
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
