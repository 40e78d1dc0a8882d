"""Units ranked by importance: those that a group keeps, the importance that is dropped, and the linear without it.

Units that a group keeps or drops together (`PrunableGroup.bundle`) have one importance, and every part of a group
(`PrunableGroup.parts`) drops equally many.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from compressor.progress import ProgressCallback, ignore_progress, tracked
from compressor.selection.allocation import Curve
from compressor.selection.options import MethodOptions
from compressor.selection.pruners.base import OptionsT, Pruner, PruningInputs
from compressor.units import PrunableGroup
from compressor.units.prunable import LinearWeights


class ImportancePruner(Pruner[OptionsT]):
    """Removes the units of least importance of each group; a subclass computes the importances. See `Pruner`.

    The loss of a group is the share of its importance that is dropped. The weights that remain keep their values.
    """

    def __init__(self, inputs: PruningInputs, options: OptionsT | None = None) -> None:
        super().__init__(inputs, options)
        self._importance: dict[str, np.ndarray] = {}

    @abstractmethod
    def importance(self, group: PrunableGroup) -> np.ndarray:
        """The importance of each bundle of units of a group, `[bundles]`, not negative."""

    def rank(self, on_progress: ProgressCallback = ignore_progress) -> None:
        for group in tracked(self.inputs.groups, on_progress):
            self._importance[group.name] = self.importance(group)

    def losses(self, on_progress: ProgressCallback = ignore_progress) -> dict[str, Curve]:
        shares = {name: importance / (importance.sum() or 1.0) for name, importance in self._importance.items()}
        return {group.name: dropped_importance(group, shares[group.name]) for group in self.inputs.groups}

    def kept(self, group: PrunableGroup, count: int) -> tuple[int, ...]:
        order = by_importance(self._importance[group.name], group.parts)
        return units_without(group, order[: group.dropped_bundles(count)])

    def finish(self, counts: Mapping[str, int], on_progress: ProgressCallback = ignore_progress) -> None:
        self.require_counts(counts)
        for group in tracked(self.inputs.groups, on_progress):
            kept = self.kept(group, counts[group.name])
            access, path = self.inputs.access, str(group.linear)
            access.set_linear(path, scaled_units(access.linear(path), group, kept, np.ones(len(kept))))


class MagnitudePruner(ImportancePruner[MethodOptions]):
    """The method `magnitude`: removes the units that are read with the smallest weights; used as `ReconstructPruner`.

    The importance of a unit is the squared norm of its columns in the linear that reads it: plain weight magnitude, as
    simple tools compute it. Weights that produce the unit, and activations, are not considered, so no row is read.
    """

    options_class = MethodOptions
    reads_rows = False

    def importance(self, group: PrunableGroup) -> np.ndarray:
        weight = self.inputs.access.linear(str(group.linear)).weight
        return np.square(weight, dtype=np.float64).sum(0).reshape(group.bundles, -1).sum(1)


def by_importance(importance: np.ndarray, parts: int = 1) -> np.ndarray:
    """Bundles, one of each part in turn, from the least important of its part to the most important.

    Of equal bundles the first comes first. With one part, all bundles are in the order of their importances.
    """
    order = np.argsort(importance.reshape(parts, -1), axis=1, kind="stable")
    starts = np.arange(parts)[:, None] * order.shape[1]
    return (starts + order).T.reshape(-1)


def units_without(group: PrunableGroup, dropped: np.ndarray) -> tuple[int, ...]:
    """Ids of the units of all bundles but the dropped ones, ascending."""
    kept = np.ones(group.bundles, bool)
    kept[dropped] = False
    return tuple(np.flatnonzero(kept.repeat(group.bundle)).tolist())


def dropped_importance(group: PrunableGroup, importance: np.ndarray) -> Curve:
    """Number of units -> the sum of the importances of the bundles that are dropped, the least important first."""
    sums = np.concatenate([[0.0], np.cumsum(importance[by_importance(importance, group.parts)])])
    return {count: float(sums[group.dropped_bundles(count)]) for count in group.counts}


def scaled_units(
    linear: LinearWeights, group: PrunableGroup, kept: tuple[int, ...], scales: np.ndarray
) -> LinearWeights:
    """A linear with the columns of kept units multiplied by a scale each, and those of dropped units zero."""
    gates = np.zeros(group.units)
    gates[list(kept)] = scales
    columns, weight = gates.repeat(group.width), np.zeros(linear.weight.shape)
    np.multiply(linear.weight, columns, out=weight, where=columns != 0)  # zero times infinity is no number
    return LinearWeights(weight, linear.bias)
