"""The method `fisher`: units by the Fisher information of a mask, and one scale for each unit that remains."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from compressor.progress import ProgressCallback, ignore_progress
from compressor.selection.allocation import Curve
from compressor.selection.options import MethodOptions
from compressor.selection.pruners.base import Pruner, PruningInputs
from compressor.selection.pruners.layerwise.in_order import DenseSums, calls_in_order
from compressor.selection.pruners.mask_gradients import mask_gradients
from compressor.selection.pruners.mask_tuning import tuned_scales
from compressor.selection.pruners.unit_importance import by_importance, dropped_importance, scale_units, units_without
from compressor.store import File, versioned
from compressor.units import PrunableGroup
from compressor.units.groups import linear_of

_FILE = File[dict[str, np.ndarray]]("gradients.safetensors", save_file, load_file)


class FisherPruner(Pruner[MethodOptions]):
    """Removes units by the Fisher information of a mask, and scales those that remain; see `Pruner`.

    Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers":

    1. Mask search (section 4.1): the importance of a unit is the sum over rows of the squared gradient of the loss of
       the row with respect to the mask. The loss of a group is the sum of the importances of its dropped units.
    2. Mask rearrangement (section 4.2): dropped units of a group are exchanged by the full Fisher matrix of the group.
    3. Mask tuning (section 4.3): one scale for each kept unit, from the first layer to the last. The scales are
       multiplied into the weights.

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
        steps = [(str(group.linear),) for group in inputs.groups]
        calls_of_groups = calls_in_order(inputs.model, steps, inputs.statistics, self._dense_sums, on_progress)
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
        gradients: g of each row, `[rows, bundles]`, float64.
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
