"""Pooling: one vector per text from the hidden states of its tokens, as sentence-transformers defines it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Pooling = Callable[[Tensor, Tensor], Tensor]
"""Pools states `[rows, positions, width]` with a mask `[rows, positions]` (0: padding) to `[rows, width]`."""


def _first(states: Tensor, mask: Tensor) -> Tensor:
    return states[:, 0]


def _last(states: Tensor, mask: Tensor) -> Tensor:
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = (positions * mask.ne(0)).amax(1)
    return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)


def _largest(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask.eq(0)[..., None], torch.finfo(states.dtype).min).amax(1)


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask) / _tokens(states, mask)


def _mean_sqrt_length(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask) / _tokens(states, mask).sqrt()


def _sum(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask[..., None].to(states.dtype)).sum(1)


def _tokens(states: Tensor, mask: Tensor) -> Tensor:
    """The number of tokens of each row, `[rows, 1]`; at least 1e-9."""
    return mask.to(states.dtype).sum(1, keepdim=True).clamp(min=1e-9)


POOLINGS: Mapping[str, Pooling] = {
    "cls": _first,
    "lasttoken": _last,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_length,
}
"""By the names of sentence-transformers. `cls` reads position 0, so rows must be padded on the right."""
