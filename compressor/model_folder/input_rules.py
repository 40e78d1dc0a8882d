"""Rules for inputs that are neither text, image nor sound: patches of images, time series, embeddings, masks.

A rule makes the inputs whose names match its pattern. Each input has one row per row of the batch; towers that read the
patches of all images in one sequence (`grid_thw`) have no rule, since their graphs run with one number of images only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class InputRequest:
    """What the rules read.

    Attributes:
        model: the model.
        batch: rows.
        seq: positions per row.
        needed: names of all inputs that the model needs.
        inputs: the inputs that exist already.
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
        """Whether images are cut into patches before the model, which reads where each patch is."""
        return bool(self.needed & PATCH_POSITIONS)

    @property
    def side(self) -> int:
        """Patches on each side of an image: two of those that are merged."""
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


PATCH_POSITIONS = frozenset(("spatial_shapes", "pixel_position_ids"))
"""Inputs that say where each patch of an image is."""
Rule = Callable[[InputRequest], Tensor | None]
"""Makes an input; None where the rule does not apply to the model."""


def make_inputs(request: InputRequest, names: Iterable[str]) -> dict[str, Tensor]:
    """The inputs among `names` that some rule can make."""
    inputs: dict[str, Tensor] = {}
    for name in names:
        rules = (rule for pattern, rule in RULES if re.fullmatch(pattern, name))
        tensors = (rule(request) for rule in rules)
        tensor = next((tensor for tensor in tensors if tensor is not None), None)
        if tensor is not None:
            inputs[name] = tensor
    return inputs


def _first(model: nn.Module, kinds: type | tuple[type, ...]) -> nn.Module | None:
    """The first module of a model, in the order of their definition, of some kinds."""
    return next((module for module in model.modules() if isinstance(module, kinds)), None)


def _patches(request: InputRequest) -> Tensor | None:
    """Patches of each image, `[batch, patch, channel * height * width]`, of models that read the sizes of images."""
    embedding = _first(request.model, nn.Linear)
    if not request.has_patches or not isinstance(embedding, nn.Linear):
        return None
    return torch.randn(request.batch, request.side**2, embedding.in_features)


def _embeddings(request: InputRequest) -> Tensor | None:
    """Embeddings `[batch, position, width]`, as wide as what the first layer reads."""
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
    """What is known of each point of a time series, `[batch, point, feature]`."""
    return torch.randn(request.batch, points or request.history, request.size("num_time_features", 0))


def _feature_mask(request: InputRequest) -> Tensor | None:
    """A mask `[batch, frame]` of `input_features` that hides nothing; None without features."""
    features = request.inputs.get("input_features")
    if features is None:
        return None
    bins = request.size("num_mel_bins", features.shape[1])
    return torch.ones(request.batch, features.shape[2 if features.shape[1] == bins else 1], dtype=torch.int64)


def _query_text(request: InputRequest) -> Tensor | None:
    """Token ids `[batch, position]` of the text that a query transformer reads beside an image."""
    config = getattr(request.model.config, "qformer_config", None)
    return None if config is None else torch.randint(config.vocab_size, (request.batch, request.seq))


def _patch_mask(request: InputRequest) -> Tensor:
    return torch.ones(request.batch, request.side**2, dtype=torch.int64)


def _patch_positions(request: InputRequest) -> Tensor:
    """Row and column of each patch, `[batch, patch, 2]`."""
    coordinates = torch.arange(request.side)
    return torch.cartesian_prod(coordinates, coordinates).repeat(request.batch, 1, 1)


RULES: tuple[tuple[str, Rule], ...] = (
    (r"pixel_values", _patches),
    (r"pixel_attention_mask", _patch_mask),
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
"""(Pattern of a name, how an input of this name is made); the first rule that applies to the model makes it."""
