"""Refit the linears of pruned groups, from the first layer to the last."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.progress import ProgressCallback
from compressor.selection.reconstruct.choice import Batch, GroupChoice, linear_of
from compressor.selection.reconstruct.forward import token_mask
from compressor.selection.reconstruct.layerwise import LayerwiseRun, LinearCall
from compressor.selection.reconstruct.refit import RefitStatistics
from compressor.selection.reconstruct.residual_sum import SumReader, find_sum
from compressor.selection.reconstruct.statistics import TokenWeights
from compressor.units.layers import Linear, linear_weight

_ROWS_OF_SEARCH = 2
"""Rows on which the sum is searched that a linear's output is added to."""


def refit_in_order(
    model: PreTrainedModel,
    choices: Sequence[GroupChoice],
    counts: Mapping[str, int],
    batches: Sequence[Batch],
    weights: Sequence[TokenWeights],
    on_progress: ProgressCallback,
) -> None:
    """Give the linear of each group, in order, the weights that restore the dense model's residual stream best.

    With x the inputs of the linear in the model as it is pruned so far and R the residual stream that its output is
    added to, and with y' and R' those of the dense model, the weights minimise

        sum over tokens of w ||W x + b + R - (y' + R')||^2 + lambda ||W - W_0||^2

    where W_0 are the weights reconstructed for the kept units. Each linear therefore repairs what all linears before it
    lost. Columns of dropped units become zero, so that the model computes the same with and without its gates.

    Args:
        model: the model, whose linears are changed.
        choices: the units of each group, in the order in which the model calls them.
        counts: name of the group -> number of units that are kept.
        batches: calibration inputs `[rows, ...]`.
        weights: weights of the tokens, see `token_weights`.
        on_progress: called with (groups, all groups).

    Raises:
        InputError: an activation is not finite.
    """
    original = copy.deepcopy(model)
    dense, pruned = LayerwiseRun(original, batches), LayerwiseRun(model, batches)
    example = {name: value[:_ROWS_OF_SEARCH] for name, value in batches[0].items()}
    for number, choice in enumerate(choices):
        on_progress(number, len(choices))
        name = str(choice.group.linear)
        start = dense.layers_of(name).start
        dense.advance(start)
        pruned.advance(start)
        reader = find_sum(original, example, name)
        _refit(model, choice, counts[choice.group.name], (dense, pruned), reader, batches, weights)
    on_progress(len(choices), len(choices))


def _refit(
    model: PreTrainedModel,
    choice: GroupChoice,
    count: int,
    runs: tuple[LayerwiseRun, LayerwiseRun],
    reader: SumReader | None,
    batches: Sequence[Batch],
    weights: Sequence[TokenWeights],
) -> None:
    """Refit the linear of one group."""
    name, linear = str(choice.group.linear), linear_of(model, choice.group)
    statistics = RefitStatistics(choice.gram.inputs, len(choice.weight), has_ones=choice.gram.has_ones)
    dense, pruned = (run.observe({name: reader}) for run in runs)
    for batch, batch_weights, dense_calls, calls in zip(batches, weights, dense, pruned, strict=True):
        for number, (dense_call, call) in enumerate(zip(dense_calls, calls, strict=True)):
            mask = token_mask(model, name, batch, call.input.shape[:-1])
            scales = batch_weights[name][number].to(call.input.device)[mask]
            statistics.add(call.input[mask], _target(dense_call, call)[mask], scales)
    start = choice.reconstruction(count)
    refit = statistics.solve(start.weight, start.bias, choice.columns(count))
    set_weights(linear, refit.weight, refit.bias)


def _target(dense: LinearCall, pruned: LinearCall) -> Tensor:
    """What the output of the linear has to be for the residual stream to be that of the dense model."""
    if dense.sum is None or pruned.sum is None:
        return dense.output
    return dense.sum - (pruned.sum - pruned.output)


def set_weights(linear: Linear, weight: np.ndarray, bias: np.ndarray | None) -> None:
    """Give a linear other weights `[outputs, inputs]`, and another bias where it has one."""
    with torch.no_grad():
        linear_weight(linear).copy_(torch.from_numpy(weight))
        if bias is not None:
            linear.bias.copy_(torch.from_numpy(bias))
