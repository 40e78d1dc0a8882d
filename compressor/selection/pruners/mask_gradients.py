"""The gradient of each row's loss with respect to a mask of the units, `dL/dm` at m = 1.

The mask multiplies the inputs of the linear that reads the units. Every row has a copy of it, so that one backward pass
gives the gradients of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from compressor.models.classifiers import AnswerKind, several_answers
from compressor.progress import ProgressCallback
from compressor.selection.pruners.base import Batch
from compressor.selection.pruners.layerwise.linear_inputs import entries_per_row
from compressor.tasks.divergence import are_classes, are_numbers, distributions, fisher_outputs, number_deviations
from compressor.tasks.forwards import forward_arguments, scored_logits_only, scored_mask
from compressor.units import PrunableGroup
from compressor.units.find import evaluation_mode
from compressor.units.layers import gradients_of, removed_afterwards


def mask_gradients(
    model: PreTrainedModel,
    groups: Sequence[PrunableGroup],
    batches: Sequence[Batch],
    names: Sequence[str],
    on_progress: ProgressCallback,
) -> dict[str, np.ndarray]:
    """The gradients of `answer_loss` of each row.

    Args:
        model: a transformers model; it runs in evaluation mode, and is restored afterwards.
        groups: the groups, each with its linear.
        batches: inputs `[batch, ...]`.
        names: the outputs that the task scores.
        on_progress: called with (batches, all batches).

    Returns:
        Name of the group -> `[examples, bundles]`, float32. A linear that a forward calls several times has one mask.
    """
    parts: dict[str, list[np.ndarray]] = {group.name: [] for group in groups}
    generator, kind = torch.Generator(model.device).manual_seed(0), several_answers(model.config)
    with evaluation_mode(model), gradients_of(model.parameters(), required=False), torch.enable_grad():
        deviations = number_deviations(model, batches, names[0])
        for number, batch in enumerate(batches):
            on_progress(number, len(batches))
            rows = len(next(iter(batch.values())))
            masks = [torch.ones(rows, g.bundles, device=model.device, requires_grad=True) for g in groups]
            with removed_afterwards(_mask_hooks(model, groups, masks)), scored_logits_only(model, batch):
                outputs: Any = model(**forward_arguments(model, batch))
            scored = fisher_outputs(outputs, names, generator, deviations, kind=kind, batch=batch)
            loss = answer_loss(scored, names, batch, kind).sum()
            gradients = torch.autograd.grad(loss, masks, allow_unused=True, materialize_grads=True)
            for group, gradient in zip(groups, gradients, strict=True):
                parts[group.name].append(gradient.cpu().numpy())
    on_progress(len(batches), len(batches))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def answer_loss(
    outputs: Sequence[Tensor], names: Sequence[str], batch: Batch, kind: AnswerKind | None = None
) -> Tensor:
    """The loss of each row on the model's own answer, `[rows]`; no labels are read.

    The losses of several outputs are summed. That of an output is, by its axes and its name:

    1. An end of a span, `start_logits` or `end_logits`: cross entropy against the largest logit; padded positions are
       left out.
    2. One number (a regression, or an embedding by `fisher_outputs`): the output itself. The squared error against the
       model's own answer has no gradient. With Gaussian noise of variance one on the answer, half the squared error has
       the gradient of the output times the noise, whose expected square is the squared gradient of the output.
    3. One distribution, `[batch, classes]`: cross entropy against the most likely class.
    4. One at each position (language models): the mean of the cross entropies at the positions of the row that count.
    5. Independent decisions on classes, of the kind `CLASSES`: the sum of their cross entropies against the more likely
       outcome of each.

    Args:
        outputs: the outputs that the task scores.
        names: their names.
        batch: the inputs, of which the masks tell padded positions; see `scored_mask`.
        kind: what the `logits` of the model are (`several_answers`); None: their axes tell.
    """
    pairs = zip(distributions(outputs, names, batch), names, strict=True)
    return torch.stack([_output_loss(logits, name, batch, kind) for logits, name in pairs]).sum(0)


def _output_loss(logits: Tensor, name: str, batch: Batch, kind: AnswerKind | None) -> Tensor:
    if are_numbers(logits, name, kind):  # case 2
        return logits.reshape(len(logits))
    if are_classes(logits, name, kind):  # case 5
        answers = (logits.detach() > 0).to(logits.dtype)
        return binary_cross_entropy_with_logits(logits, answers, reduction="none").sum(-1)
    losses = _cross_entropy(logits)
    if losses.dim() == 1:  # cases 1 and 3
        return losses
    mask = scored_mask(batch, *losses.shape).to(losses.device)  # case 4
    return (losses * mask).sum(1) / mask.sum(1).clamp(min=1)


def _cross_entropy(logits: Tensor) -> Tensor:
    """The cross entropy of distributions `[..., classes]` against their most likely classes, `[...]`."""
    flat = logits.flatten(0, -2)
    return cross_entropy(flat, flat.detach().argmax(-1), reduction="none").reshape(logits.shape[:-1])


def _mask_hooks(
    model: nn.Module, groups: Sequence[PrunableGroup], masks: Sequence[Tensor]
) -> Iterator[RemovableHandle]:
    """Multiply the inputs of the groups' linears by masks `[examples, bundles]`."""

    def multiply(linear: str, columns: int, mask: Tensor, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        wide = mask.repeat_interleave(columns, 1).repeat_interleave(entries_per_row(linear, len(x), len(mask)), 0)
        return (x * wide.to(x.dtype).reshape(len(x), *(1,) * (x.dim() - 2), -1), *args[1:])

    for group, mask in zip(groups, masks, strict=True):
        hook = partial(multiply, str(group.linear), group.bundle * group.width, mask)
        yield model.get_submodule(str(group.linear)).register_forward_pre_hook(hook)
