"""Random images and sound in the size and layout that a model reads."""

from __future__ import annotations

from optimum.utils import input_generators as optimum
from optimum.utils.normalized_config import NormalizedConfig, NormalizedConfigManager
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

IMAGES, VIDEOS, FEATURES, WAVEFORMS = "pixel_values", "pixel_values_videos", "input_features", "input_values"
SIGNALS = (IMAGES, VIDEOS, FEATURES, WAVEFORMS)
"""Names of inputs that hold images, videos or sound."""

_AUDIO: dict[str, type[optimum.DummyAudioInputGenerator]] = {
    "audio-spectrogram-transformer": optimum.ASTDummyAudioInputGenerator,
    "speech_to_text": optimum.Speech2TextDummyAudioInputGenerator,
}
"""Generators for families whose sound is neither `[batch, features, frames]` nor `[batch, samples]`."""

_VISION_PARTS = ("vision_config", "backbone_config", "encoder")
_AUDIO_PARTS = ("audio_config", "encoder_config", "encoder")
_FEATURE_COUNTS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_size", "input_dim")
_FRAME_COUNTS = ("num_frames", "frames_per_clip")


def example_signal(name: str, model: PreTrainedModel, task: str, batch: int) -> Tensor:
    """A batch of images, videos or sound of the size that the configuration defines.

    Args:
        name: one of `SIGNALS`.
        model: the model that reads it.
        task: optimum's name of the model's task.
        batch: rows.
    """
    if name in (IMAGES, VIDEOS):
        return _example_images(name, model, task, batch)
    return _example_sound(name, model, task, batch)


def _example_images(name: str, model: PreTrainedModel, task: str, batch: int) -> Tensor:
    """Images `[batch, channel, height, width]`; videos `[batch, frame, channel, height, width]`."""
    config = _vision_config(model.config)
    frames = next((getattr(config, count) for count in _FRAME_COUNTS if getattr(config, count, None)), None)
    count = batch * (frames or 1)
    images = optimum.DummyVisionInputGenerator(task, _normalize(config), batch_size=count).generate(IMAGES)
    return images if frames is None else images.unflatten(0, (batch, frames))


def _vision_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that has the size of images, or all of it if none has."""
    parts = [config, *(getattr(config, part) for part in _VISION_PARTS if hasattr(config, part))]
    return next((part for part in parts if getattr(part, "image_size", None)), getattr(config, "vision_config", config))


def _example_sound(name: str, model: PreTrainedModel, task: str, batch: int) -> Tensor:
    """Waveforms `[batch, sample]`; features `[batch, feature, frame]`, or `[batch, frame, feature]`."""
    parts = (model.config, *(getattr(model.config, part) for part in _AUDIO_PARTS if hasattr(model.config, part)))
    counts = ((part, name) for name in _FEATURE_COUNTS for part in parts if isinstance(getattr(part, name, None), int))
    config, count = next(counts, (model.config, ""))
    features, positions = getattr(config, count, None), getattr(config, "max_source_positions", None)
    convolves_frames = any(isinstance(part, nn.Conv1d) and part.in_channels == features for part in model.modules())
    sizes = {} if features is None else {"feature_size": features}
    if convolves_frames and positions is not None:
        sizes["nb_max_frames"] = 2 * positions  # of the convolutions of Whisper's encoder, the second has stride two
    generator = _AUDIO.get(config.model_type, optimum.DummyAudioInputGenerator)
    sound = generator(task, _normalize(config), batch_size=batch, **sizes).generate(name)
    in_rows = features is not None and generator is optimum.DummyAudioInputGenerator and not convolves_frames
    return sound.mT.contiguous() if name == FEATURES and in_rows else sound


def _normalize(config: PretrainedConfig) -> NormalizedConfig:
    """The configuration with the attribute names that optimum's generators read."""
    if config.model_type in NormalizedConfigManager._conf:
        return NormalizedConfigManager.get_normalized_config_class(config.model_type)(config)
    return NormalizedConfig(config)
