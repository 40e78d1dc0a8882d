"""Outputs of models that read a text in segments: states or logits, and the memory for the next segment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from compressor.segment_memory import new_memory_names

Memories = tuple[Tensor, ...]
"""One tensor per layer: its input hidden states, before the norm, `[batch, memory, hidden]`."""


@dataclass
class SegmentStates(ModelOutput):
    """Output of the models without language model head.

    Attributes:
        last_hidden_state: normalized, `[batch, segment, hidden]`.
        memories: memories for the next segment.
    """

    last_hidden_state: Tensor | None = None
    memories: Memories | None = None


@dataclass
class SegmentOutput(ModelOutput):
    """Output of the language models.

    Attributes:
        loss: mean loss per token, if labels are given.
        logits: `[batch, segment, vocabulary]`.
        memories: memories for the next segment.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    memories: Memories | None = None


def by_name(outputs: SegmentStates | SegmentOutput) -> dict[str, Tensor]:
    """The outputs by their names in an exported graph with memory."""
    memories = outputs.memories or ()
    return {name: value for name, value in outputs.items() if torch.is_tensor(value)} | dict(
        zip(new_memory_names(len(memories)), memories, strict=True)
    )
