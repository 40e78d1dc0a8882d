"""Forwards of a PyTorch model on batches of arrays: tensors, arguments, and the scored positions of outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor import answers
from compressor.answers import DECODER_IDS, DECODER_MASK, IGNORED, LABELS, MASK


def tensors_of(batch: Mapping[str, np.ndarray], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A batch of arrays as tensors; those on the CPU share the memory of the arrays."""
    return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}


def arrays_of(batch: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """A batch of tensors on any device as arrays."""
    return {name: tensor.cpu().numpy() for name, tensor in batch.items()}


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
    return None if DECODER_IDS in batch else batch.get(MASK)


def scored_mask(batch: Mapping[str, Tensor], rows: int, positions: int) -> Tensor:
    """`answers.scored_mask` of tensors, bool `[batch, position]`, on the CPU."""
    arrays = arrays_of({name: batch[name] for name in (LABELS, MASK, DECODER_IDS, DECODER_MASK) if name in batch})
    return torch.from_numpy(answers.scored_mask(arrays, rows, positions))


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


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed loss in nats and number of predicted tokens of each example, `[batch, 2]` float64.

    Logits are `[batch, position, vocabulary]`; targets `[batch, position]` are the tokens that positions predict, or
    -100.
    """
    sums = [
        torch.nn.functional.cross_entropy(scores.float(), row, ignore_index=IGNORED, reduction="none").double().sum()
        for scores, row in zip(logits, targets, strict=True)  # a float32 copy of the batch may not fit
    ]
    return torch.stack([torch.stack(sums), (targets != IGNORED).sum(1).double()], dim=1)


def reader(model: PreTrainedModel) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """`summed_loss` by a PyTorch model in evaluation mode, from ids and targets of the next segment of every stream.

    Both are `[streams, segment]`. Memories, which are empty at the start, are kept between calls.
    """
    memories: tuple[Tensor, ...] | None = None

    def forward(ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
        nonlocal memories
        batch = tensors_of({"input_ids": ids, "targets": targets}, model.device)
        with torch.no_grad():
            outputs = model(input_ids=batch["input_ids"], memories=memories)
        memories = outputs.memories
        return summed_loss(outputs.logits, batch["targets"]).cpu().numpy()

    return forward
