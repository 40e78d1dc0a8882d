"""The method `fisher`: units by the Fisher information of a mask, and one scale for each unit that remains."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from scipy.sparse.linalg import lsmr

from compressor.progress import ProgressCallback, ignore_progress
from compressor.selection.allocation import Curve
from compressor.selection.options import MethodOptions
from compressor.selection.pruners.base import Pruner, PruningInputs
from compressor.selection.pruners.layerwise.in_order import DenseSums, TargetedCall, calls_in_order
from compressor.selection.pruners.layerwise.refit import RefitSums
from compressor.selection.pruners.mask_gradients import mask_gradients
from compressor.selection.pruners.unit_importance import by_importance, dropped_importance, scale_units, units_without
from compressor.store import File, versioned
from compressor.units.groups import linear_of
from compressor.units.layers import Linear, linear_sizes, linear_weight
from compressor.units.prunable import PrunableGroup, unit_columns

_FILE = File[dict[str, np.ndarray]]("gradients.safetensors", save_file, load_file)
DAMP = 1.0
"""Weight of the squared distance of the scales from one, against the squared residual of the normal equations."""
LARGEST = 10.0
"""Largest magnitude of a scale; a solution beyond it is unstable."""


class FisherPruner(Pruner[MethodOptions]):
    """Removes units by the Fisher information of a mask, and scales those that remain; see `Pruner`.

    Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers":

    1. Mask search (section 4.1): the importance of a unit is the sum over rows of the squared gradient of the loss of
       the row with respect to the mask. The loss of a group is the sum of the importances of its dropped units.
    2. Mask rearrangement (section 4.2): dropped units of a group are exchanged by the full Fisher matrix of the group.
    3. Mask tuning (section 4.3 and the published code): one scale for each kept unit, from the first layer to the last.
       The scales are multiplied into the weights.

    The losses are those on the model's own answers, see `answer_loss`: no labels are used, and nothing is drawn but,
    for embeddings, the signs of `fisher_outputs`. The query heads of one key/value head are one unit, or units that are
    exchanged among themselves alone.
    """

    options_class = MethodOptions

    def __init__(self, inputs: PruningInputs, options: MethodOptions | None = None) -> None:
        super().__init__(inputs, options)
        self._gradients: dict[str, np.ndarray] = {}
        self._kept: dict[tuple[str, int], tuple[int, ...]] = {}

    def rank(self, on_progress: ProgressCallback = ignore_progress) -> None:
        gradients = self.store.memo("mask-gradients", {}, partial(self._measure, on_progress), _FILE)
        self._gradients = {name: gradient.astype(np.float64) for name, gradient in gradients.items()}

    @versioned(1, "compressor.selection.pruners.mask_gradients")
    def _measure(self, on_progress: ProgressCallback, _: Path) -> dict[str, np.ndarray]:
        inputs = self.inputs
        return mask_gradients(inputs.model, inputs.groups, inputs.statistics, inputs.outputs, on_progress)

    def losses(self, on_progress: ProgressCallback = ignore_progress) -> dict[str, Curve]:
        squares = {name: np.square(gradient).sum(0) for name, gradient in self._gradients.items()}
        return {group.name: dropped_importance(group, squares[group.name]) for group in self.inputs.groups}

    def kept(self, group: PrunableGroup, count: int) -> tuple[int, ...]:
        if (group.name, count) not in self._kept:
            dropped = least_costly_bundles(self._gradients[group.name], group.dropped_bundles(count), group.parts)
            self._kept[group.name, count] = units_without(group, dropped)
        return self._kept[group.name, count]

    def finish(self, counts: Mapping[str, int], on_progress: ProgressCallback = ignore_progress) -> None:
        self.require_counts(counts)
        inputs = self.inputs
        linear_sets = [(str(group.linear),) for group in inputs.groups]
        calls_of_groups = calls_in_order(inputs.model, linear_sets, inputs.statistics, self._dense_sums, on_progress)
        for group, calls in zip(inputs.groups, calls_of_groups, strict=True):
            linear, kept = linear_of(inputs.model, group), self.kept(group, counts[group.name])
            scales = tuned_scales(linear, group, kept, calls) if kept else np.ones(0)
            scale_units(linear, group, kept, scales)

    @functools.cached_property
    def _dense_sums(self) -> DenseSums:
        """The residual stream of the dense model; computed before the first scales are."""
        inputs = self.inputs
        return DenseSums.of_copy(inputs.model, [str(group.linear) for group in inputs.groups], inputs.statistics)


def least_costly_bundles(gradients: np.ndarray, count: int, parts: int = 1) -> np.ndarray:
    """The bundles of a group that are dropped, by mask rearrangement.

    With F = sum over rows of g g' the Fisher matrix of the group, dropping a set of bundles costs the sum of F over the
    rows and columns of the set. The search starts from the bundles with the smallest diagonal elements, as many from
    each part. In ascending order of these, each of the others is then added to the set, and the bundle of the same part
    whose removal lowers the cost most leaves it, unless nothing depends on it.

    Args:
        gradients: g of each row, `[examples, bundles]`, float64.
        count: number of bundles that are dropped; a multiple of `parts`.
        parts: number of consecutive parts of equal size, each of which drops equally many bundles.

    Returns:
        Their indices, ascending.
    """
    fisher = gradients.T @ gradients
    diagonal = np.diagonal(fisher)
    order = by_importance(diagonal, parts)
    part_of = np.arange(len(order)) // (len(order) // parts)
    dropped = np.zeros(len(order), bool)
    dropped[order[:count]] = True
    sums = fisher[:, dropped].sum(1)
    matters = diagonal > 0  # removing another bundle costs nothing, as if it were removed already
    for bundle in order[count:][matters[order[count:]]] if count else ():
        dropped[bundle] = True
        sums += fisher[bundle]
        exchangeable = dropped & matters & (part_of == part_of[bundle])
        removed = np.argmax(np.where(exchangeable, 2 * sums - diagonal, -np.inf))
        dropped[removed] = False
        sums -= fisher[removed]
    return np.flatnonzero(dropped)


def tuned_scales(
    linear: Linear, group: PrunableGroup, kept: tuple[int, ...], calls: Iterable[TargetedCall]
) -> np.ndarray:
    """Mask tuning: the scales of the kept units of a group, by which the linear reproduces its targets best.

    With A the contributions of the kept units to the outputs of the linear, `[tokens * outputs, units]`, B the targets
    without the bias, and r = s - 1, they minimise

        ||A'A r - A'(B - A 1)||^2 + ||r||^2

    Units of one bundle have one scale. If a scale is beyond 10 in magnitude, or if the error does not fall, the
    scales of the whole group are one. (The paper's code ends tuning at such a layer; here later groups are tuned.)

    Args:
        linear: the linear that reads the units, with its original weights.
        group: the group.
        kept: ids of the kept units, in whole bundles, at least one.
        calls: the calls of the linear.

    Raises:
        InputError: an activation is not finite.
    """
    columns = torch.from_numpy(unit_columns(kept, group.width))
    sums = RefitSums(len(columns), linear_sizes(linear)[1], has_ones=False, name=group.name)
    for call in calls:
        targets = call.targets if linear.bias is None else call.targets - linear.bias.detach()
        sums.add(call.inputs[:, columns.to(call.inputs.device)], targets)
    weight = linear_weight(linear).detach().double().cpu().numpy()[:, columns]
    starts = np.arange(0, len(columns), group.bundle * group.width)
    contributions = np.add.reduceat((weight.T @ weight) * sums.gram.matrix, starts, 1)
    normal = np.add.reduceat(contributions, starts, 0)
    right = np.add.reduceat((weight.T * sums.cross).sum(1), starts) - normal.sum(1)
    shifts = lsmr(normal, right, damp=DAMP)[0]
    falls = shifts @ normal @ shifts < 2 * shifts @ right
    if not falls or np.abs(1 + shifts).max() > LARGEST:
        shifts = np.zeros(len(starts))
    return (1 + shifts).repeat(group.bundle)
