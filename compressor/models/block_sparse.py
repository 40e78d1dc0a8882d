"""BigBird's block-sparse attention as full attention with a mask: the same function at every length.

At a short text, transformers' models with `attention_type` block_sparse replace their attention modules by full
attention for good, so that later outputs depend on earlier texts. For longer texts, queries of a block attend to the
adjacent blocks, and to the first and the last block; queries of the first and the last block attend to all. In
evaluation, the randomly drawn blocks are copies of the first block, whose positions therefore count several times.
Outputs at padding are zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.results import Note, NoteCode

_SPARSE, _FULL = "block_sparse", "original_full"


@dataclass(frozen=True)
class BlockMask:
    """The mask of block-sparse attention, by the positions of a block and the number of randomly drawn blocks."""

    block: int
    drawn: int

    @property
    def full_length(self) -> int:
        """The maximum number of tokens of a text whose positions are all visible."""
        return (5 + 2 * self.drawn) * self.block

    def scores(self, states: Tensor) -> Tensor:
        """The summand of attention scores, `[1, 1, query, key]`, for hidden states `[batch, position, width]`."""
        positions = torch.arange(states.shape[1], device=states.device)
        blocks = torch.div(positions, self.block, rounding_mode="floor")
        query, key, last = blocks[:, None], blocks[None], blocks[-1]
        sees_all = (query == 0) | (query == last)
        visible = sees_all | (key == 0) | (key == last) | ((query - key).abs() <= 1)
        copies = ((key == 0) & ~sees_all).to(states.dtype) * math.log1p(self.drawn)
        scores = torch.where(visible, copies, torch.finfo(states.dtype).min)
        return torch.where(positions[-1] >= self.full_length, scores, 0.0)[None, None]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Add the mask to the arguments of full attention: a forward pre-hook."""
        states, mask, *rest = (*args, kwargs.pop("attention_mask", None)) if len(args) < 2 else args
        scores = self.scores(states)
        if mask is not None:  # the sum of two minima is minus infinity, whose softmax may be NaN
            scores = (mask + scores).clamp(min=torch.finfo(scores.dtype).min)
        return (states, scores, *rest), kwargs

    def zero_padding(self, module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Set outputs of full attention to zero at padding: a forward hook."""
        context, *rest = output
        states, scores = args[:2]
        # The first position attends to all positions except padding.
        visible = scores[:, 0, 0] > torch.finfo(scores.dtype).min / 2
        is_full = torch.arange(states.shape[1], device=states.device)[-1] < self.full_length
        return (context * (visible | is_full)[..., None].to(context.dtype), *rest)


def attend_by_masks(model: nn.Module) -> tuple[Note, ...]:
    """Replace block-sparse attention of a model by full attention with a mask; returns a note if there is any.

    Weights and their names stay. No blocks are drawn in training.
    """
    masks = []
    owners: list[Any] = list(model.modules())
    for owner in owners:
        # The outermost module replaces the attention modules inside.
        if getattr(owner, "attention_type", None) != _SPARSE or not hasattr(owner, "set_attention_type"):
            continue
        config: Any = owner.config
        mask = BlockMask(config.block_size, config.num_random_blocks)
        owner.set_attention_type(_FULL)
        for module in owner.modules():
            attention = getattr(module, "self", None)
            if hasattr(module, "set_attention_type") and isinstance(attention, nn.Module):
                attention.register_forward_pre_hook(mask, with_kwargs=True)
                attention.register_forward_hook(mask.zero_padding)
        masks.append(mask)
    text = (
        "block-sparse attention is exported as full attention with a mask: the same function at every length, but"
        " above {} tokens no faster than full attention"
    )
    return tuple(Note(text=text.format(mask.full_length), code=NoteCode.BLOCKS_AS_MASK) for mask in masks[:1])
