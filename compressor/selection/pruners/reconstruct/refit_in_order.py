"""Refit the linears of pruned groups, from the first layer to the last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.progress import ProgressCallback
from compressor.selection.pruners.base import Batch
from compressor.selection.pruners.layerwise.in_order import DenseSums, TargetedCall, calls_in_order
from compressor.selection.pruners.layerwise.linear_inputs import TokenWeights
from compressor.selection.pruners.layerwise.refit import RefitSums
from compressor.selection.pruners.reconstruct.choice import GroupChoice
from compressor.units.groups import linear_of
from compressor.units.layers import Linear, linear_at, linear_sizes, linear_weight


class Damping(NamedTuple):
    """What is added to the diagonal of Gram matrices, as shares of their mean diagonals.

    Attributes:
        damp: share in the choice of units and the reconstruction of weights.
        ridge: share in refits.
    """

    damp: float
    ridge: float

    def maximum(self, second: Damping) -> Damping:
        """The larger of both shares."""
        return Damping(max(self.damp, second.damp), max(self.ridge, second.ridge))


def refit_in_order(
    model: PreTrainedModel,
    choices: Sequence[GroupChoice],
    counts: Mapping[str, int],
    batches: Sequence[Batch],
    weights: Sequence[TokenWeights],
    sums: DenseSums,
    feeders: Mapping[str, Sequence[str]],
    on_progress: ProgressCallback,
    *,
    ridge: float,
) -> dict[str, Damping]:
    """Give the linears of each group, in order, the weights that restore the dense model's activations best.

    With x the inputs of the linear that a group ends in, in the model as it is pruned so far, and R the residual stream
    that its output is added to, and with y' and R' those of the dense model, the weights minimise

        sum over tokens of w ||W x + b + R - (y' + R')||^2 + lambda ||W - W_0||^2

    where W_0 are the weights reconstructed for the kept units. Each linear therefore repairs what all linears before it
    lost. Before it, the feeders of the group, whose inputs are no longer those of the dense model, are refitted to
    their outputs y' in the same way; their W_0 are their own weights. Columns of dropped units become zero, so that the
    model computes the same with and without its gates.

    Args:
        model: the model, whose linears are changed.
        choices: the units of each group, in the order in which the model calls them.
        counts: name of the group -> number of units that are kept.
        batches: calibration inputs `[batch, ...]`.
        weights: weights of the tokens, see `Sensitivity`.
        sums: the sums y' + R' of the dense model, of all linears.
        feeders: path of the linear that a group ends in -> paths of its feeders, see `feeders_of`.
        on_progress: called with (linears, all linears).
        ridge: lambda, as a share of the mean diagonal of the sums over x x'.

    Returns:
        Name of the group -> the largest damping used for it; more than requested where a matrix has no Cholesky factor.

    Raises:
        InputError: an activation is not finite.
    """
    refits: list[tuple[Sequence[str], GroupChoice]] = []
    # In a layer that is called several times, inputs differ from the dense model's even before the first group.
    inputs_are_dense = all(len(calls) == 1 for calls in weights[0].values())
    for choice in choices:
        linear, count = str(choice.group.linear), counts[choice.group.name]
        if count and feeders[linear] and not inputs_are_dense:
            refits.append((feeders[linear], choice))
        refits.append(((linear,), choice))
        inputs_are_dense = inputs_are_dense and count == choice.group.counts[-1]
    calls_of_refits = calls_in_order(model, [linears for linears, _ in refits], batches, sums, on_progress)
    used: dict[str, Damping] = {}
    for (linears, choice), calls in zip(refits, calls_of_refits, strict=True):
        name = choice.group.name
        if choice.group.linear in linears:
            damping = _refit(linear_of(model, choice.group), choice, counts[name], calls, weights, ridge)
        else:
            damping = _refit_feeders(model, linears, choice, calls, weights, ridge)
        used[name] = used.get(name, damping).maximum(damping)
    return used


def _refit(
    linear: Linear,
    choice: GroupChoice,
    count: int,
    calls: Iterable[TargetedCall],
    weights: Sequence[TokenWeights],
    ridge: float,
) -> Damping:
    """Refit the linear of one group; only the kept inputs are summed up.

    Where there are none, and no bias, the weights are zero and no call is read.
    """
    columns, has_ones = choice.columns(count), choice.bias is not None
    if not len(columns) and not has_ones:
        set_weights(linear, np.zeros(choice.weight.shape), None)
        return Damping(choice.removal.damp, ridge)
    sums = RefitSums(len(columns), len(choice.weight), has_ones=has_ones, name=choice.group.name)
    index = torch.from_numpy(columns)
    for call in calls:
        scales = _weights_of(call, choice, weights)
        sums.add(call.inputs[:, index.to(call.inputs.device)], call.targets, scales)
    start = choice.reconstruction(count)
    weight = np.zeros_like(start.weight)
    refit = sums.solve(start.weight[:, columns], start.bias, np.arange(len(columns)), ridge=ridge)
    weight[:, columns] = refit.weight
    set_weights(linear, weight, refit.bias)
    return Damping(max(choice.removal.damp, start.damp), refit.ridge)


def _refit_feeders(
    model: PreTrainedModel,
    feeders: Sequence[str],
    choice: GroupChoice,
    calls: Iterable[TargetedCall],
    weights: Sequence[TokenWeights],
    ridge: float,
) -> Damping:
    """Refit the feeders of one group.

    The neurons of a token have the weight of the feed-forward's output at this token. Keys and values of a token serve
    the queries of all tokens, so that all tokens of heads have equal weights.
    """
    linears = {name: linear_at(model, name) for name in feeders}
    sums = {
        name: RefitSums(*linear_sizes(linear), has_ones=linear.bias is not None, name=name)
        for name, linear in linears.items()
    }
    for call in calls:
        scales = None if choice.group.type == "heads" else _weights_of(call, choice, weights)
        sums[call.linear].add(call.inputs, call.targets, scales)
    used = Damping(choice.damp, ridge)
    for name, linear in linears.items():
        weight = linear_weight(linear).detach().double().cpu().numpy()
        bias = None if linear.bias is None else linear.bias.detach().double().cpu().numpy()
        refit = sums[name].solve(weight, bias, np.arange(weight.shape[1]), ridge=ridge)
        set_weights(linear, refit.weight, refit.bias)
        used = used.maximum(Damping(choice.damp, refit.ridge))
    return used


def _weights_of(call: TargetedCall, choice: GroupChoice, weights: Sequence[TokenWeights]) -> Tensor:
    """The weights of the tokens of a call: those of the linear that the group ends in."""
    scales = weights[call.batch][str(choice.group.linear)][call.number].to(call.mask.device)
    return scales[call.mask]


def set_weights(linear: Linear, weight: np.ndarray, bias: np.ndarray | None) -> None:
    """Give a linear other weights `[outputs, inputs]`, and another bias where it has one."""
    with torch.no_grad():
        linear_weight(linear).copy_(torch.from_numpy(weight))
        if bias is not None:
            linear.bias.copy_(torch.from_numpy(bias))
