"""The error of a student's hidden states, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compressor.errors import ErrorCode, InputError
from compressor.tasks.forwards import decoder_mask
from compressor.training.teacher_outputs import Outputs

_DECODER_STATES = "decoder_hidden_states"
HIDDEN_STATES = ("hidden_states", "encoder_hidden_states", _DECODER_STATES)
"""Outputs with one tensor for each layer, the embeddings first."""


def hidden_error(target: Outputs, output: Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    """The relative squared error of the hidden states, averaged over layers; zero where there are none."""
    layers, taught = (sorted(name for name in part if "." in name) for part in (output, target))
    if layers != taught:
        raise InputError(
            f"the student has {len(layers)} layers of hidden states and the teacher {len(taught)}; give equally deep"
            " models, or hidden_weight=0",
            code=ErrorCode.INVALID_VALUE,
            field="hidden_weight",
        )
    errors = []
    for name, dense in target.items():
        kind, _, layer = name.partition(".")
        if layer:
            mask = decoder_mask(batch) if kind == _DECODER_STATES else batch.get("attention_mask")
            weight = _position_weights(dense, mask)
            error = (dense - output[name]).float().square() * weight
            errors.append(error.sum() / (dense.float().square() * weight).sum().clamp(min=1e-12))
    if not errors:
        return torch.zeros((), device=next(iter(output.values())).device)
    return torch.stack(errors).mean()


def _position_weights(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """One for each position that is not padding, else zero, to be multiplied with `[rows, positions, width]`."""
    if mask is None or mask.shape != hidden.shape[: mask.dim()]:
        return torch.ones((), device=hidden.device)
    return mask.to(hidden.device, torch.float32).reshape(*mask.shape, *(1,) * (hidden.dim() - mask.dim()))
