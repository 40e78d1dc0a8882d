"""Random inputs other than text: images and sound, and by rules patches of images, time series, embeddings and masks.

A rule generates the inputs whose names match its pattern. The first axis of each input is the batch; towers that read
the patches of all images in one sequence (`grid_thw`) have no rule, since their graphs run with one number of images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from optimum.utils import input_generators as optimum
from optimum.utils.normalized_config import NormalizedConfig, NormalizedConfigManager
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.model_folder.processor import IMAGES

VIDEOS, FEATURES, WAVEFORMS = "pixel_values_videos", "input_features", "input_values"
SIGNALS = (IMAGES, VIDEOS, FEATURES, WAVEFORMS)
"""Names of inputs that hold images, videos or sound."""

_AUDIO: dict[str, type[optimum.DummyAudioInputGenerator]] = {
    "audio-spectrogram-transformer": optimum.ASTDummyAudioInputGenerator,
    "speech_to_text": optimum.Speech2TextDummyAudioInputGenerator,
}
"""Generators for families whose sound is neither `[batch, feature, frame]` nor `[batch, sample]`."""

_VISION_PARTS = ("vision_config", "backbone_config", "encoder")
_AUDIO_PARTS = ("audio_config", "encoder_config", "encoder")
_FEATURE_COUNTS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_size", "input_dim")
_FRAME_COUNTS = ("num_frames", "frames_per_clip")
PATCH_POSITIONS = frozenset(("spatial_shapes", "pixel_position_ids"))
"""Inputs with the position of each patch in its image."""


def example_signal(name: str, model: PreTrainedModel, task: str, batch: int) -> Tensor:
    """A batch of images, videos or sound of the size that the configuration defines.

    Images are `[batch, channel, height, width]`, videos `[batch, frame, channel, height, width]`.

    Args:
        name: one of `SIGNALS`.
        task: optimum's name of the model's task.
    """
    if name not in (IMAGES, VIDEOS):
        return _example_sound(name, model, task, batch)
    config: Any = model.config
    parts = [getattr(model.config, part) for part in _VISION_PARTS if hasattr(model.config, part)]
    sized = next((part for part in (config, *parts) if getattr(part, "image_size", None)), None)
    config = sized or getattr(config, "vision_config", config)
    frames = next((getattr(config, count) for count in _FRAME_COUNTS if getattr(config, count, None)), None)
    count = batch * (frames or 1)
    images = optimum.DummyVisionInputGenerator(task, _normalize(config), batch_size=count).generate(IMAGES)
    return images if frames is None else images.unflatten(0, (batch, frames))


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


@dataclass(frozen=True)
class InputRequest:
    """What the rules read.

    Attributes:
        model: the model.
        batch: examples.
        seq: positions of an example.
        needed: names of all inputs that the model needs.
        inputs: the inputs that were generated before.
    """

    model: PreTrainedModel
    batch: int
    seq: int
    needed: frozenset[str]
    inputs: Mapping[str, Tensor]

    def size(self, name: str, default: int) -> int:
        """A whole number of the configuration, or the default."""
        value = getattr(self.model.config, name, None)
        return value if isinstance(value, int) and value > 0 else default

    @property
    def has_patches(self) -> bool:
        """Whether the model reads patches of images and their positions."""
        return bool(self.needed & PATCH_POSITIONS)

    @property
    def side(self) -> int:
        """Patches on each side of an image: two after they are merged."""
        return 2 * self.size("spatial_merge_size", 2)

    @property
    def future(self) -> int:
        """Points of a time series to predict."""
        return self.size("prediction_length", self.seq)

    @property
    def history(self) -> int:
        """Points of a time series before the prediction."""
        lags = getattr(self.model.config, "lags_sequence", None) or [0]
        return self.size("context_length", self.seq) + int(max(lags))


Rule = Callable[[InputRequest], Tensor | None]
"""Generates an input; None where the rule does not apply to the model."""


def make_inputs(request: InputRequest, names: Iterable[str]) -> dict[str, Tensor]:
    """The inputs among `names` that some rule can generate."""
    inputs: dict[str, Tensor] = {}
    for name in names:
        tensors = (rule(request) for pattern, rule in RULES if re.fullmatch(pattern, name))
        if (tensor := next((tensor for tensor in tensors if tensor is not None), None)) is not None:
            inputs[name] = tensor
    return inputs


def _first(model: nn.Module, kinds: type | tuple[type, ...]) -> nn.Module | None:
    """The first module of some kinds, in the order of definition."""
    return next((module for module in model.modules() if isinstance(module, kinds)), None)


def _patches(request: InputRequest) -> Tensor | None:
    """Patches of each image, `[batch, patch, channel * height * width]`, of models that read the sizes of images."""
    embedding = _first(request.model, nn.Linear)
    if not request.has_patches or not isinstance(embedding, nn.Linear):
        return None
    return torch.randn(request.batch, request.side**2, embedding.in_features)


def _embeddings(request: InputRequest) -> Tensor | None:
    """Embeddings `[batch, position, width]` of the width that the first layer reads."""
    match _first(request.model, (nn.Linear, nn.LayerNorm)):
        case nn.Linear(in_features=width) | nn.LayerNorm(normalized_shape=(width, *_)):
            return torch.randn(request.batch, request.seq, width)
    return None


def _series(request: InputRequest, points: int | None = None) -> Tensor:
    """Values of a time series, `[batch, point]`, or `[batch, point, channel]` where there are several."""
    channels = request.size("num_input_channels", 0) or request.size("input_size", 1)
    shape = (request.batch, points or request.history)
    return torch.randn(*shape, channels) if channels > 1 else torch.randn(shape)


def _time_features(request: InputRequest, points: int | None = None) -> Tensor:
    """Features of each point of a time series, `[batch, point, feature]`."""
    return torch.randn(request.batch, points or request.history, request.size("num_time_features", 0))


def _feature_mask(request: InputRequest) -> Tensor | None:
    """A mask `[batch, frame]` of `input_features` that hides nothing; None without features."""
    features = request.inputs.get("input_features")
    if features is None:
        return None
    bins = request.size("num_mel_bins", features.shape[1])
    return torch.ones(request.batch, features.shape[2 if features.shape[1] == bins else 1], dtype=torch.int64)


def _query_text(request: InputRequest) -> Tensor | None:
    """Token ids `[batch, position]` of the text that a query transformer reads with an image."""
    config = getattr(request.model.config, "qformer_config", None)
    return None if config is None else torch.randint(config.vocab_size, (request.batch, request.seq))


def _patch_positions(request: InputRequest) -> Tensor:
    """Row and column of each patch, `[batch, patch, 2]`."""
    coordinates = torch.arange(request.side)
    return torch.cartesian_prod(coordinates, coordinates).repeat(request.batch, 1, 1)


RULES: tuple[tuple[str, Rule], ...] = (
    (r"pixel_values", _patches),
    (r"pixel_attention_mask", lambda request: torch.ones(request.batch, request.side**2, dtype=torch.int64)),
    (r"pixel_position_ids", _patch_positions),
    (r"spatial_shapes", lambda request: torch.full((request.batch, 2), request.side)),
    (r"inputs_embeds|hidden_states|query_embeds|patch_embeds|context|latents", _embeddings),
    (r"attention_mask", lambda request: torch.ones(request.batch, request.seq, dtype=torch.int64)),
    (r"qformer_input_ids", _query_text),
    (r"input_features_mask", _feature_mask),
    (r"past_values", _series),
    (r"past_observed_mask", lambda request: torch.ones_like(_series(request))),
    (r"past_time_features", _time_features),
    (r"future_values", lambda request: _series(request, request.future)),
    (r"future_time_features", lambda request: _time_features(request, request.future)),
)
"""(Pattern of a name, rule for inputs of this name); the first rule that applies to the model generates an input."""
