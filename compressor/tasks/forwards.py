"""Forwards of a model on a batch of a task: their arguments, and the scored positions of their outputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LABELS = "labels"
IGNORED = -100
"""Label of a position that is not scored."""
SPAN_ENDS = ("start_logits", "end_logits")
"""Outputs that are logits over the positions of a text."""
DECODER_IDS, DECODER_MASK = "decoder_input_ids", "decoder_attention_mask"


def forward_arguments(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Keyword arguments of a forward without a cache and without a loss, on the device of the model.

    Labels are removed from the batch, unless an encoder-decoder derives its decoder's inputs from them.
    """
    keeps_labels = model.config.is_encoder_decoder and DECODER_IDS not in batch
    names = [name for name in batch if name != LABELS or keeps_labels]
    arguments: dict[str, Any] = {name: batch[name].to(model.device) for name in names}
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    return arguments


def decoder_mask(batch: Mapping[str, Tensor]) -> Tensor | None:
    """The mask `[batch, position]` that is zero at padding of a decoder's input; None if it is unknown.

    1. The decoder's attention mask.
    2. Else the positions with a label, if the batch has labels of positions.
    3. Else the attention mask, unless the batch has decoder ids: the decoder reads the encoder's ids, shifted by one.
    """
    if DECODER_MASK in batch:
        return batch[DECODER_MASK]
    labels = batch.get(LABELS)
    if labels is not None and labels.dim() == 2 and not labels.is_floating_point():
        return labels != IGNORED
    return None if DECODER_IDS in batch else batch.get("attention_mask")


def scored_mask(batch: Mapping[str, Tensor], rows: int, positions: int) -> Tensor:
    """The scored positions of an output `[batch, position, ...]`, bool `[batch, position]`, on the CPU.

    These are the positions with a label if the batch has labels of positions, else those of the attention mask of
    encoder or decoder, else all.
    """
    attention = DECODER_MASK if DECODER_IDS in batch or DECODER_MASK in batch else "attention_mask"
    labels = batch.get(LABELS)
    if labels is not None and labels.shape == (rows, positions) and not labels.is_floating_point():
        return (labels != IGNORED).cpu()
    mask = batch.get(attention)
    if mask is not None and mask.shape == (rows, positions):
        return (mask != 0).cpu()
    return torch.ones(rows, positions, dtype=torch.bool)


@contextmanager
def scored_logits_only(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, forwards compute logits over a vocabulary only at scored positions; they are zero elsewhere.

    The matmul with the vocabulary is half of the work of a small encoder that fills masks, of whose positions 15% are
    scored. Models whose output embeddings are not a linear with inputs `[batch, position, width]` compute all
    positions.

    Args:
        model: a transformers model, or a wrapper of it; its hooks are removed on exit.
        batch: the inputs `[batch, ...]` of the forwards, with labels if these mark the scored positions.
    """
    network = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    head = None if network is None else network.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        yield
        return
    masks: list[Tensor | None] = []

    def select(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        masks.append(None)
        if not args or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            return args
        mask = scored_mask(batch, *args[0].shape[:2])
        if bool(mask.all()):
            return args
        masks[-1] = mask.to(args[0].device)
        return (args[0][masks[-1]], *args[1:])

    def scatter(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        mask = masks.pop()
        if mask is None:
            return output
        logits = output.new_zeros(*mask.shape, output.shape[-1])
        logits[mask] = output
        return logits

    with head.register_forward_pre_hook(select), head.register_forward_hook(scatter):
        yield
