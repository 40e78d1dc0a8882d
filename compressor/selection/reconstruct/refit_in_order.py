"""Refit the linears of pruned groups, from the first layer to the last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from compressor.progress import ProgressCallback
from compressor.selection.reconstruct.choice import Batch, GroupChoice, linear_of
from compressor.selection.reconstruct.in_order import DenseSums, TargetedCall, calls_in_order
from compressor.selection.reconstruct.refit import RefitStatistics
from compressor.selection.reconstruct.statistics import TokenWeights
from compressor.units.layers import Linear, linear_weight


def refit_in_order(
    model: PreTrainedModel,
    choices: Sequence[GroupChoice],
    counts: Mapping[str, int],
    batches: Sequence[Batch],
    weights: Sequence[TokenWeights],
    sums: DenseSums,
    on_progress: ProgressCallback,
    *,
    ridge: float = 0.02,
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
        weights: weights of the tokens, see `Sensitivity`.
        sums: the sums y' + R' of the dense model.
        on_progress: called with (groups, all groups).
        ridge: lambda, as a share of the mean diagonal of the sums over x x'.

    Raises:
        InputError: an activation is not finite.
    """
    calls_of_groups = calls_in_order(model, [choice.group for choice in choices], batches, sums, on_progress)
    for choice, calls in zip(choices, calls_of_groups, strict=True):
        _refit(linear_of(model, choice.group), choice, counts[choice.group.name], calls, weights, ridge)


def _refit(
    linear: Linear,
    choice: GroupChoice,
    count: int,
    calls: Iterable[TargetedCall],
    weights: Sequence[TokenWeights],
    ridge: float,
) -> None:
    """Refit the linear of one group; only the kept inputs are summed up."""
    columns, has_ones = choice.columns(count), choice.gram.has_ones
    statistics = RefitStatistics(len(columns), len(choice.weight), has_ones=has_ones)
    index = torch.from_numpy(columns)
    for call in calls:
        scales = weights[call.batch][str(choice.group.linear)][call.number].to(call.mask.device)
        statistics.add(call.inputs[:, index.to(call.inputs.device)], call.targets, scales[call.mask])
    start = choice.reconstruction(count)
    weight, bias = np.zeros_like(start.weight), start.bias
    if len(columns) or has_ones:
        refit = statistics.solve(start.weight[:, columns], start.bias, np.arange(len(columns)), ridge=ridge)
        weight[:, columns], bias = refit.weight, refit.bias
    set_weights(linear, weight, bias)


def set_weights(linear: Linear, weight: np.ndarray, bias: np.ndarray | None) -> None:
    """Give a linear other weights `[outputs, inputs]`, and another bias where it has one."""
    with torch.no_grad():
        linear_weight(linear).copy_(torch.from_numpy(weight))
        if bias is not None:
            linear.bias.copy_(torch.from_numpy(bias))
