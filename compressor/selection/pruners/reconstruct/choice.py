"""Which units each group keeps at every number of units, and what the model loses by it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.progress import ProgressCallback
from compressor.selection.allocation import interpolate
from compressor.selection.pruners.base import Batch
from compressor.selection.pruners.layerwise.gram import Gram
from compressor.selection.pruners.layerwise.linear_inputs import TokenWeights, collect_inputs, count_tokens
from compressor.selection.pruners.layerwise.refit import RefitSums
from compressor.selection.pruners.reconstruct.curves import PartialKL
from compressor.selection.pruners.reconstruct.second_order import (
    Reconstruction,
    Removal,
    reconstruct,
    removal_order,
)
from compressor.units import PrunableGroup
from compressor.units.groups import linear_of
from compressor.units.layers import linear_sizes, linear_weight, unit_columns

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


def require_tokens(model: PreTrainedModel, groups: Sequence[PrunableGroup], batches: Sequence[Batch]) -> None:
    """Check that calibration batches have at least as many tokens as the linear of each group has inputs.

    Args:
        model: the model.
        groups: the groups, each with its linear.
        batches: inputs `[batch, ...]`.

    Raises:
        InputError: they have fewer.
    """
    tokens = count_tokens(model, batches, list({str(group.linear): None for group in groups}))
    rows = sum(len(next(iter(batch.values()))) for batch in batches)
    for group in groups:
        count, (inputs, _) = tokens[str(group.linear)], linear_sizes(linear_of(model, group))
        if count >= inputs:
            continue
        needed = int(np.ceil(rows * inputs / max(count, 1)))
        raise InputError(
            f"{group.name}: the {rows} rows that units are chosen by have {count} tokens, fewer than its {inputs}"
            f" inputs; allow at least {needed} rows (--prune-rows), and give a third more than that (--data), because"
            " up to a quarter is held out",
            code=ErrorCode.TOO_FEW_ROWS,
            group=group.name,
            rows=rows,
            needed=needed,
        )


def gather_grams(
    model: PreTrainedModel,
    groups: Sequence[PrunableGroup],
    batches: Sequence[Batch],
    weights: Sequence[TokenWeights],
    on_progress: ProgressCallback,
) -> dict[str, Gram]:
    """Sum up the inputs of each group's linear over calibration batches; only Gram matrices are kept.

    Args:
        model: the model.
        groups: the groups, each with its linear.
        batches: inputs `[batch, ...]`.
        weights: weights of the tokens, see `Sensitivity`.
        on_progress: called with (batches, all batches).

    Returns:
        Module path of the linear -> Gram matrix.

    Raises:
        InputError: an activation is not finite.
    """
    linears = {str(group.linear): linear_of(model, group) for group in groups}
    sums = {
        name: RefitSums(linear_sizes(linear)[0], has_ones=linear.bias is not None, name=name)
        for name, linear in linears.items()
    }

    def observe(name: str, inputs: Tensor, scales: Tensor) -> None:
        sums[name].add(inputs, weights=scales)

    for number, (batch, batch_weights) in enumerate(zip(batches, weights, strict=True)):
        on_progress(number, len(batches))
        collect_inputs(model, batch, list(linears), observe, batch_weights)
    on_progress(len(batches), len(batches))
    return {name: sums.pop(name).gram for name in linears}  # the sums are freed one after another


def choices_of(
    model: PreTrainedModel,
    groups: Sequence[PrunableGroup],
    grams: Mapping[str, Gram],
    metrics: Mapping[str, np.ndarray],
    damp: float,
) -> dict[str, GroupChoice]:
    """Name of the group -> its choice, from the linear's present weights.

    Args:
        model: the model.
        groups: the groups, each with its linear.
        grams: module path of the linear -> Gram matrix of its inputs.
        metrics: module path of the linear -> metric of its outputs, see `Sensitivity`; the identity is added to it.
        damp: share of the mean diagonal of a Gram matrix that is added to its diagonal.
    """
    choices = {}
    for group in groups:
        linear = linear_of(model, group)
        bias = None if linear.bias is None else linear.bias.detach().double().cpu().numpy()
        weight = linear_weight(linear).detach().to(torch.promote_types(linear_weight(linear).dtype, torch.float32))
        metric = metrics[str(group.linear)] + _UNIFORM * np.eye(len(weight))
        choices[group.name] = GroupChoice(group, weight.cpu().numpy().copy(), bias, grams, damp, metric)
    return choices


def loss_counts(group: PrunableGroup) -> tuple[int, ...]:
    """The numbers of units at which the loss of a group is measured, ascending."""
    counts = group.counts
    shares = {counts[round(share * (len(counts) - 1))] for share in _LOSS_SHARES}
    return tuple(sorted({*counts[:2], counts[-1], *shares}))


def loss_curve(choice: GroupChoice, divergence: PartialKL) -> dict[int, float]:
    """What the model loses if one group alone keeps fewer units: number of units -> loss, at every number.

    The loss is the mean divergence of the model's outputs from those of the whole model, with the linear of the group
    reconstructed. It is measured at some numbers, and interpolated between them.

    Args:
        choice: the units of the group.
        divergence: measures the loss on calibration rows.
    """
    group = choice.group
    curve = {group.counts[-1]: 0.0}
    for count in loss_counts(group)[:-1]:
        part = choice.reconstruction(count)
        bias = None if part.bias is None else torch.from_numpy(part.bias)
        curve[count] = divergence.mean(str(group.linear), torch.from_numpy(part.weight), bias)
    logger.debug("%s: loss %s", group.name, curve)
    return interpolate(curve, group.counts)
