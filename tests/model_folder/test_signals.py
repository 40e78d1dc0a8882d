"""Images, videos and sound have the sizes and the layout that the first operator of the model reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from compressor.model_folder.signals import FEATURES, IMAGES, example_signal

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
