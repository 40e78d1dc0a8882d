"""The kind of an attention, from one call: causal, bidirectional, or over a second sequence."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from compressor.units.hook import Call
from graph_passes import Kind

ForwardArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one forward of a module."""
_CROSS_INPUTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Arguments by which transformers' attention modules receive a second sequence to attend to."""


def kind_of_call(call: Call, arguments: ForwardArguments) -> Kind:
    """The kind of attention of a call, from the arguments of its module's forward and from its mask."""
    if _has_second_sequence(call.module, arguments):
        return "cross"
    if call.query.shape[2] == call.key.shape[2]:
        return "causal" if _is_causal(call) else "bidirectional"
    # More keys than queries in self-attention: a memory before them, or persistent vectors that every query sees.
    is_self_attention = call.mask is not None and getattr(call.module, "is_causal", False)
    return "causal" if is_self_attention and _is_causal(call) else "cross"


def _has_second_sequence(module: nn.Module, arguments: ForwardArguments) -> bool:
    """Whether a module received a second sequence to attend to, by a named parameter of its forward.

    Modules of self-attention may receive the same argument in `**kwargs` and ignore it.
    """
    args, kwargs = arguments
    names = list(inspect.signature(type(module).forward).parameters)[1:]  # without `self`
    by_name = {**dict(zip(names, args, strict=False)), **kwargs}
    return any(name in names and by_name.get(name) is not None for name in _CROSS_INPUTS)


def _is_causal(call: Call) -> bool:
    """Whether no query attends to a later key, in any row."""
    flag = call.options.get("is_causal")
    flag = getattr(call.module, "is_causal", True) if flag is None else flag
    visible = call.visible
    if visible is None:  # SDPA's own flag decides; eager attention without a mask attends to everything
        return bool(flag) and call.implementation == "sdpa"
    if visible.dim() != 4 or not flag:
        return False
    length = call.query.shape[2]
    hidden = ~visible.expand(-1, -1, length, -1)  # a mask of padding only has one row for all queries
    later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
    # The keys of the queries' own positions follow a memory of any length.
    starts = range(hidden.shape[3] - length + 1)
    return any(bool(hidden[..., start : start + length][..., later].all()) for start in starts)
