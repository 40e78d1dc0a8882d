"""Refit the linears of pruned groups, from the first layer to the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from compressor.progress import ProgressCallback
from compressor.selection.pruners.network import LinearWeights, Network, RefitSet, SumsOfLinears
from compressor.selection.pruners.reconstruct.choice import GroupChoice


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
    network: Network,
    choices: Sequence[GroupChoice],
    counts: Mapping[str, int],
    on_progress: ProgressCallback,
    *,
    ridge: float,
) -> dict[str, Damping]:
    """Give the linears of each group, in order, the weights that restore the dense network's activations best.

    With x the inputs of the linear that a group ends in, in the network as it is pruned so far, and R the residual
    stream that its output is added to, and with y' and R' those of the dense network, the weights minimise

        sum over tokens of w ||W x + b + R - (y' + R')||^2 + lambda ||W - W_0||^2

    where W_0 are the weights reconstructed for the kept units. Each linear therefore repairs what all linears before it
    lost. Before it, the feeders of the group, whose inputs are no longer those of the dense network, are refitted to
    their outputs y' in the same way; their W_0 are their own weights. Columns of dropped units become zero, so that the
    network computes the same with and without its gates.

    The neurons of a token have the weight of the feed-forward's output at this token. Keys and values of a token serve
    the queries of all tokens, so that all tokens of heads have equal weights in the refit of feeders.

    Args:
        network: the network, whose linears are changed.
        choices: the units of each group, in the order in which the network calls them.
        counts: name of the group -> number of units that are kept.
        on_progress: called with (sets of linears, all sets).
        ridge: lambda, as a share of the mean diagonal of the sums over x x'.

    Returns:
        Name of the group -> the largest damping used for it; more than requested where a matrix has no Cholesky factor.

    Raises:
        InputError: an activation is not finite.
    """
    refits: list[tuple[RefitSet, GroupChoice]] = []
    # In a layer that is called several times, inputs differ from the dense network's even before the first group.
    inputs_are_dense = network.calls_once
    for choice in choices:
        linear, count = str(choice.group.linear), counts[choice.group.name]
        feeders = network.feeders(linear)
        if count and feeders and not inputs_are_dense:
            refits.append((RefitSet(feeders, None if choice.group.type == "heads" else linear), choice))
        refits.append((RefitSet((linear,), linear, choice.columns(count)), choice))
        inputs_are_dense = inputs_are_dense and count == choice.group.counts[-1]
    used: dict[str, Damping] = {}
    sums_of_sets = network.sums_in_order([part for part, _ in refits], on_progress)
    for (part, choice), sums in zip(refits, sums_of_sets, strict=True):
        if part.columns is None:
            damping = _refit_feeders(network, part, choice, sums, ridge)
        else:
            damping = _refit(network, part.columns, choice, counts[choice.group.name], sums, ridge)
        used[choice.group.name] = used.get(choice.group.name, damping).maximum(damping)
    return used


def _refit(
    network: Network, columns: np.ndarray, choice: GroupChoice, count: int, sums: SumsOfLinears, ridge: float
) -> Damping:
    """Refit the linear of one group; only the kept inputs are summed up.

    Where there are none, and no bias, the weights are zero and no example runs.
    """
    linear = str(choice.group.linear)
    if not len(columns) and choice.bias is None:
        network.set_linear(linear, LinearWeights(np.zeros(choice.weight.shape), None))
        return Damping(choice.removal.damp, ridge)
    gathered = sums()[linear]
    start = choice.reconstruction(count)
    weight = np.zeros_like(start.weight)
    refit = gathered.solve(start.weight[:, columns], start.bias, np.arange(len(columns)), ridge=ridge)
    weight[:, columns] = refit.weight
    network.set_linear(linear, LinearWeights(weight, refit.bias))
    return Damping(max(choice.removal.damp, start.damp), refit.ridge)


def _refit_feeders(network: Network, part: RefitSet, choice: GroupChoice, sums: SumsOfLinears, ridge: float) -> Damping:
    """Refit the feeders of one group."""
    gathered, used = sums(), Damping(choice.damp, ridge)
    for name in part.linears:
        dense = network.linear(name)
        refit = gathered[name].solve(dense.weight, dense.bias, np.arange(dense.weight.shape[1]), ridge=ridge)
        network.set_linear(name, LinearWeights(refit.weight, refit.bias))
        used = used.maximum(Damping(choice.damp, refit.ridge))
    return used
