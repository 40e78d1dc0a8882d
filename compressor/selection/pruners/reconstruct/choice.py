"""Which units each group keeps at every number of units, and what the model loses by it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compressor.errors import ErrorCode, InputError
from compressor.selection.allocation import interpolate
from compressor.selection.pruners.layerwise.gram import Gram
from compressor.selection.pruners.network import Divergence, LinearWeights, Network
from compressor.selection.pruners.reconstruct.second_order import (
    Reconstruction,
    Removal,
    reconstruct,
    removal_order,
)
from compressor.units.prunable import PrunableGroup, unit_columns

logger = logging.getLogger(__name__)

_LOSS_SHARES = (1 / 8, 3 / 8, 3 / 4)
"""Shares of the units of a group at which the loss is measured, besides none, all and one step: between none and few
units lies most of the loss. More widths do not make the interpolated curve more exact than the rows do."""

_UNIFORM = 1.0
"""Weight of the identity in the metric of outputs, whose mean eigenvalue is one: the gradients of few rows may miss
directions. The value was chosen by the divergence of MiniLM on SST-2."""


@dataclass(frozen=True, eq=False)
class GroupChoice:
    """The units that a group keeps at every number of units.

    Attributes:
        group: the group.
        weight: weight of its linear, `[outputs, inputs]`.
        bias: its bias `[outputs]`, float64; None for a linear without bias.
        grams: module path of a linear -> Gram matrix of its inputs.
        damp: share of the mean diagonal that is added to the diagonal.
        metric: weights of errors of the linear's outputs in the choice of units, `[outputs, outputs]`; None: the
            identity. The weights that reproduce the outputs best do not depend on it.
    """

    group: PrunableGroup
    weight: np.ndarray
    bias: np.ndarray | None
    grams: Mapping[str, Gram]
    damp: float = 0.01
    metric: np.ndarray | None = None

    @property
    def gram(self) -> Gram:
        """Gram matrix of the inputs of the linear, which may be read from a file."""
        return self.grams[str(self.group.linear)]

    @functools.cached_property
    def removal(self) -> Removal:
        """The order in which the bundles of the group are removed: single units, or all queries of a key/value head."""
        group = self.group
        together = group.multiple // group.bundle
        return removal_order(
            self.weight,
            self.gram,
            group.bundles,
            together=together,
            parts=group.parts,
            damp=self.damp,
            metric=self.metric,
        )

    def kept(self, count: int) -> tuple[int, ...]:
        """Ids of the units that are kept if `count` are, ascending."""
        bundles = np.array(self.removal.kept(count // self.group.bundle), np.intp)
        return tuple(int(unit) for unit in unit_columns(bundles, self.group.bundle))

    def columns(self, count: int) -> np.ndarray:
        """The inputs of the linear that belong to the kept units."""
        return unit_columns(self.kept(count), self.group.width)

    def reconstruction(self, count: int) -> Reconstruction:
        """The weights of the kept inputs that reproduce the linear's outputs best."""
        return reconstruct(self.weight, self.bias, self.gram, self.columns(count), damp=self.damp)


def require_tokens(network: Network, groups: Sequence[PrunableGroup]) -> None:
    """Check that the calibration examples have at least as many tokens as the linear of each group has inputs.

    Args:
        network: the network.
        groups: the groups, each with its linear.

    Raises:
        InputError: they have fewer.
    """
    tokens = network.count_tokens(list({str(group.linear): None for group in groups}))
    for group in groups:
        count, inputs = tokens[str(group.linear)], group.units * group.width
        if count >= inputs:
            continue
        needed = int(np.ceil(network.rows * inputs / max(count, 1)))
        raise InputError(
            f"{group.name}: the {network.rows} rows that units are chosen by have {count} tokens, fewer than its"
            f" {inputs} inputs; allow at least {needed} rows (--prune-rows), and give a third more than that (--data),"
            " because up to a quarter is held out",
            code=ErrorCode.TOO_FEW_ROWS,
            group=group.name,
            rows=network.rows,
            needed=needed,
        )


def choices_of(
    network: Network,
    groups: Sequence[PrunableGroup],
    grams: Mapping[str, Gram],
    metrics: Mapping[str, np.ndarray],
    damp: float,
) -> dict[str, GroupChoice]:
    """Name of the group -> its choice, from the linear's present weights.

    Args:
        network: the network.
        groups: the groups, each with its linear.
        grams: module path of the linear -> Gram matrix of its inputs.
        metrics: module path of the linear -> metric of its outputs, see `Network.weigh`; the identity is added to it.
        damp: share of the mean diagonal of a Gram matrix that is added to its diagonal.
    """
    choices = {}
    for group in groups:
        dense = network.linear(str(group.linear))
        metric = metrics[str(group.linear)] + _UNIFORM * np.eye(len(dense.weight))
        choices[group.name] = GroupChoice(group, dense.weight, dense.bias, grams, damp, metric)
    return choices


def loss_counts(group: PrunableGroup) -> tuple[int, ...]:
    """The numbers of units at which the loss of a group is measured, ascending."""
    counts = group.counts
    shares = {counts[round(share * (len(counts) - 1))] for share in _LOSS_SHARES}
    return tuple(sorted({*counts[:2], counts[-1], *shares}))


def loss_curve(choice: GroupChoice, divergence: Divergence) -> dict[int, float]:
    """What the model loses if one group alone keeps fewer units: number of units -> loss, at every number.

    The loss is the mean divergence of the model's outputs from those of the whole model, with the linear of the group
    reconstructed. It is measured at some numbers, and interpolated between them.

    Args:
        choice: the units of the group.
        divergence: measures the loss on held-out examples.
    """
    group = choice.group
    curve = {group.counts[-1]: 0.0}
    for count in loss_counts(group)[:-1]:
        part = choice.reconstruction(count)
        curve[count] = divergence(str(group.linear), LinearWeights(part.weight, part.bias))
    logger.debug("%s: loss %s", group.name, curve)
    return interpolate(curve, group.counts)
