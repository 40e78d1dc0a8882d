"""The calls of the linears of groups in a model that is pruned from the first layer to the last."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from compressor.progress import ProgressCallback
from compressor.selection.reconstruct.choice import Batch
from compressor.selection.reconstruct.forward import token_mask
from compressor.selection.reconstruct.layerwise import LayerwiseRun, LinearCall
from compressor.selection.reconstruct.residual_sum import find_sum
from compressor.units import PrunableGroup

_ROWS_OF_SEARCH = 2
"""Rows on which the sum is searched that a linear's output is added to."""


@dataclass(frozen=True)
class TargetedCall:
    """One call of a linear on one batch, in the model as it is pruned so far.

    Attributes:
        batch: number of the batch.
        number: which of the calls of the linear in the forward it is, from 0.
        mask: the tokens of its input that are not padding, usually `[rows, positions]`.
        inputs: its inputs without padding, `[tokens, in]`.
        targets: the outputs, bias included, for which the residual stream is that of the dense model, `[tokens, out]`.
    """

    batch: int
    number: int
    mask: Tensor
    inputs: Tensor
    targets: Tensor


def calls_in_order(
    model: PreTrainedModel, groups: Sequence[PrunableGroup], batches: Sequence[Batch], on_progress: ProgressCallback
) -> Iterator[Iterator[TargetedCall]]:
    """For each group, the calls of its linear on all batches.

    With y the output of a linear and R the residual stream that it is added to, and with y' and R' those of the dense
    model, the target of y is y' + R' - R; without such a sum it is y'. Each linear can therefore repair what all
    linears before it lost. The linear of a group is changed before the next group is requested.

    Args:
        model: the model; it is dense at the start.
        groups: the groups in the order in which the model calls them, each with its linear.
        batches: inputs `[rows, ...]`.
        on_progress: called with (groups, all groups).
    """
    original = copy.deepcopy(model)
    dense, pruned = LayerwiseRun(original, batches), LayerwiseRun(model, batches)
    example = {name: value[:_ROWS_OF_SEARCH] for name, value in batches[0].items()}
    for number, group in enumerate(groups):
        on_progress(number, len(groups))
        linear = str(group.linear)
        start = dense.layers_of(linear).start
        dense.advance(start)
        pruned.advance(start)
        readers = {linear: find_sum(original, example, linear)}
        yield _targeted(model, batches, dense.observe(readers), pruned.observe(readers))
    on_progress(len(groups), len(groups))


def _targeted(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    dense: Iterator[list[LinearCall]],
    pruned: Iterator[list[LinearCall]],
) -> Iterator[TargetedCall]:
    for number, (batch, dense_calls, calls) in enumerate(zip(batches, dense, pruned, strict=True)):
        for dense_call, call in zip(dense_calls, calls, strict=True):
            mask = token_mask(model, call.linear, batch, call.input.shape[:-1])
            yield TargetedCall(number, call.number, mask, call.input[mask], _target(dense_call, call)[mask])


def _target(dense: LinearCall, pruned: LinearCall) -> Tensor:
    """What the output of the linear has to be for the residual stream to be that of the dense model."""
    if dense.sum is None or pruned.sum is None:
        return dense.output
    return dense.sum - (pruned.sum - pruned.output)
