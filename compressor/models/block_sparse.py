"""BigBird's block-sparse attention as full attention with a mask, which is the same function at every length.

transformers' models with `attention_type` block_sparse attend to all positions of a short text, for which they replace
their attention modules for good: what follows depends on the texts before. Above that length, the query positions of a
block see the blocks beside it, the first and the last block; those of the first and the last block see all. Outside of
training, the randomly drawn blocks are copies of the first block, whose positions therefore count several times.
Outputs of query positions that are padding are zero.
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
    """The mask of block-sparse attention.

    Attributes:
        block: positions of a block.
        drawn: number of drawn blocks.
    """

    block: int
    drawn: int

    @property
    def full_length(self) -> int:
        """The maximum length up to which all positions are visible, in tokens."""
        return (5 + 2 * self.drawn) * self.block

    def scores(self, states: Tensor) -> Tensor:
        """What is added to the scores, `[1, 1, query, key]`, for hidden states `[batch, position, width]`."""
        positions = torch.arange(states.shape[1], device=states.device)
        blocks = torch.div(positions, self.block, rounding_mode="floor")
        query, key, last = blocks[:, None], blocks[None], blocks[-1]
        sees_all = (query == 0) | (query == last)
        visible = sees_all | (key == 0) | (key == last) | ((query - key).abs() <= 1)
        copies = ((key == 0) & ~sees_all).to(states.dtype) * math.log1p(self.drawn)
        scores = torch.where(visible, copies, torch.finfo(states.dtype).min)
        return torch.where(positions[-1] >= self.full_length, scores, 0.0)[None, None]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a module of full attention, with the mask added: a forward pre-hook."""
        states, mask, *others = (*args, kwargs.pop("attention_mask", None)) if len(args) < 2 else args
        scores = self.scores(states)
        if mask is not None:  # the sum of two lowest numbers is minus infinity, whose softmax may be NaN
            scores = (mask + scores).clamp(min=torch.finfo(scores.dtype).min)
        return (states, scores, *others), kwargs

    def zero_padding(self, module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs of a module of full attention, with zeros for queries that are padding: a forward hook."""
        context, *others = output
        states, scores = args[:2]
        # The first position sees all others that are no padding.
        visible = scores[:, 0, 0] > torch.finfo(scores.dtype).min / 2
        is_full = torch.arange(states.shape[1], device=states.device)[-1] < self.full_length
        return (context * (visible | is_full)[..., None].to(context.dtype), *others)


def attend_by_masks(model: nn.Module) -> tuple[Note, ...]:
    """Let the block-sparse attentions of a model be full attentions with a mask; returns a note where there are any.

    Weights and their names stay. In training nothing is drawn, as in evaluation.
    """
    masks = []
    owners: list[Any] = list(model.modules())
    for owner in owners:
        # The outermost module changes the attentions inside of it.
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
