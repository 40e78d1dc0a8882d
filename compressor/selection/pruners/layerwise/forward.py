"""The inputs of linears in forwards on calibration batches: which tokens are padding, and which row they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.tasks.forwards import decoder_mask


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor among the arguments of a module's forward; None if it has none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def token_mask(model: PreTrainedModel, linear: str, batch: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """The tokens of a linear's input that are not padding.

    All are where there is no mask (images), or the axes of the input differ from those of the mask. Tokens that are
    flattened row by row are recognised.

    Args:
        model: a transformers model.
        linear: module path of the linear.
        batch: inputs of the model `[rows, ...]`, with or without `labels`.
        shape: shape of the linear's input without its last axis, usually `[rows, positions]`.

    Returns:
        Bool, of `shape`, on the device of the model.
    """
    mask = padding_mask(model, linear, batch)
    if mask is not None and (mask.shape == shape or shape == (mask.numel(),)):
        return mask.reshape(shape).to(model.device) != 0
    return torch.ones(shape, dtype=torch.bool, device=model.device)


def padding_mask(model: PreTrainedModel, linear: str, batch: Mapping[str, Tensor]) -> Tensor | None:
    """The mask `[rows, positions]` of a batch that is zero where the input of a linear is padding; None: there is none.

    1. A module outside the encoder of an encoder-decoder: the mask of the decoder, see `decoder_mask`.
    2. Any other module: the attention mask.
    """
    module = model.get_submodule(linear)
    if not model.config.is_encoder_decoder or any(part is module for part in model.get_encoder().modules()):
        return batch.get("attention_mask")
    return decoder_mask(batch)


def entries_per_row(linear: str, entries: int, rows: int) -> int:
    """How many entries on the first axis of a linear's input belong to each row: windows, or tokens row by row.

    Raises:
        InputError: they do not belong to rows one after another, as in experts that read chosen tokens.
    """
    if entries % rows:
        raise InputError(
            f"{linear}: it reads {entries} tokens of {rows} rows, as experts do that read chosen tokens; how much a row"
            " depends on it cannot be measured: leave it out of the groups",
            code=ErrorCode.UNSUPPORTED_MODEL,
            linear=linear,
            entries=entries,
            rows=rows,
        )
    return entries // rows
