"""Attention with relative positions over memory, segment and persistent vectors, with one softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from compressor.models.configuration import SegmentConfig


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in basic operators, with the signature of transformers' attention interface.

    Args:
        module: the attention module; dropout applies if it is in training mode.
        query: `[batch, head, query, head_dim]`.
        key: `[batch, head, key, head_dim]`.
        value: `[batch, head, key, head_dim]`.
        attention_mask: added to the scores `[batch, head, query, key]`, or None.
        scaling: factor of the scores.
        dropout: dropout probability of the attention map.

    Returns:
        Output `[batch, query, head, head_dim]` and map `[batch, head, query, key]`.
    """
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def sinusoids(length: int, width: int, like: Tensor) -> Tensor:
    """Encodings `[length, width]` of the distances length-1, ..., 0, sines before cosines (R in Transformer-XL).

    Args:
        length: number of distances.
        width: even width of an encoding.
        like: a tensor whose device and type the result has.
    """
    steps = torch.arange(width // 2, device=like.device)  # integers, here and below: TensorRT 8.6 has no float Range
    distance = length - 1 - torch.arange(length, device=like.device)
    angles = distance.float()[:, None] * torch.exp(steps.float() * (-2 * math.log(10000.0) / width))
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)


def rel_shift(scores: Tensor) -> Tensor:
    """Convert scores by distance into scores by key (Transformer-XL, appendix B).

    Args:
        scores: `[batch, head, query, key]`, column p for distance key - 1 - p.

    Returns:
        Scores `[batch, head, query, key]`; entry [i, j] is that of distance i + memory - j. Entries of negative
        distance (the future) are arbitrary.
    """
    batch, heads, queries, keys = scores.shape
    padded = nn.functional.pad(scores, (1, 0)).reshape(batch, heads, keys + 1, queries)
    return padded[:, :, 1:].reshape(batch, heads, queries, keys)


class RelativeAttention(nn.Module):
    """Attention over memory, segment and persistent vectors, with relative positions.

    The score of query i and key j is `((q_i + b_w) k_j + (q_i + b_r) W_r R_{i+S-j}) / sqrt(head_dim)` (Transformer-XL,
    section 3.3). Persistent vectors (All-attention, eq. 1) are attended by every query, never masked, and have no
    position.

    Args:
        config: sizes of the model.
        heads: heads of this site, at least one.
        persistent: number N of persistent key and value vectors per head.
    """

    is_causal = True
    reads_segments = True
    """Queries start at position 0 of the segment, regardless of the length of the memory."""

    def __init__(self, config: SegmentConfig, heads: int, persistent: int = 0) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.config, self.heads, self.head_dim, self.persistent = config, heads, config.head_dim, persistent
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        width = heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.r_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size)
        self.content_bias = nn.Parameter(torch.zeros(heads, self.head_dim))  # b_w
        self.position_bias = nn.Parameter(torch.zeros(heads, self.head_dim))  # b_r
        if persistent:
            self.persistent_key = nn.Parameter(torch.zeros(heads, persistent, self.head_dim))
            self.persistent_value = nn.Parameter(torch.zeros(heads, persistent, self.head_dim))

    def forward(self, context: Tensor, length: int, positions: Tensor, masked: Tensor) -> Tensor:
        """Attend from a segment to memory, segment and persistent vectors.

        Args:
            context: normalized memory and segment, `[batch, key, hidden]`; the last `length` positions are the segment.
            length: number of queries.
            positions: encodings of distances `[key, hidden]`, farthest first.
            masked: True where a query must not attend to a key; can be broadcast to `[batch, 1, query, key]`.

        Returns:
            `[batch, query, hidden]`.
        """
        batch, keys = context.shape[:2]
        query = self._heads(self.q_proj(context[:, keys - length :]))
        key, value = self._heads(self.k_proj(context)), self._heads(self.v_proj(context))
        distance = self._heads(self.r_proj(positions)[None])
        biased = (query + self.position_bias.to(query.dtype)).transpose(1, 2)
        mask = rel_shift(biased @ distance.permute(0, 2, 3, 1)) * self.scaling
        mask = mask.masked_fill(masked, torch.finfo(mask.dtype).min)
        if self.persistent:
            # The factors keep both in the range of the projected keys and values (Sukhbaatar et al., 2019).
            key = self._append_persistent(key, self.persistent_key * math.sqrt(self.head_dim))
            value = self._append_persistent(value, self.persistent_value * math.sqrt(self.persistent))
            mask = nn.functional.pad(mask, (0, self.persistent))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(
            self,
            (query + self.content_bias.to(query.dtype)).transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(out.reshape(batch, length, -1))

    def _heads(self, states: Tensor) -> Tensor:
        """`[batch, position, head * head_dim]` -> `[batch, position, head, head_dim]`."""
        return states.view(*states.shape[:2], -1, self.head_dim)

    def _append_persistent(self, states: Tensor, vectors: Tensor) -> Tensor:
        """Append persistent vectors `[head, N, head_dim]` to the positions of every row."""
        rows = vectors.transpose(0, 1).to(states.dtype).expand(states.shape[0], -1, -1, -1)
        return torch.cat([states, rows], dim=1)
