"""The method `magnitude`: units by the norm of the weights that read them, as a baseline."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compressor.progress import ProgressCallback, ignore_progress
from compressor.selection.allocation import Curve
from compressor.selection.options import MethodOptions
from compressor.selection.pruners.base import Pruner, PruningInputs
from compressor.selection.pruners.unit_importance import by_importance, dropped_importance, scale_units, units_without
from compressor.units import PrunableGroup
from compressor.units.groups import linear_of
from compressor.units.layers import linear_weight


class MagnitudePruner(Pruner[MethodOptions]):
    """Removes the units that are read with the smallest weights; see `Pruner`.

    The importance of a unit is the squared norm of its columns in the linear that reads it: plain weight magnitude, as
    simple tools compute it. Weights that produce the unit, and activations, are not considered, so no row is read. The
    loss of a group is the share of the squared norm of its linear that is dropped. The weights that remain keep their
    values.
    """

    options_class = MethodOptions
    reads_rows = False

    def __init__(self, inputs: PruningInputs, options: MethodOptions | None = None) -> None:
        super().__init__(inputs, options)
        self._importance: dict[str, np.ndarray] = {}

    def rank(self, on_progress: ProgressCallback = ignore_progress) -> None:
        groups = self.inputs.groups
        for number, group in enumerate(groups):
            on_progress(number, len(groups))
            weight = linear_weight(linear_of(self.inputs.model, group)).detach().double().cpu().numpy()
            self._importance[group.name] = np.square(weight).sum(0).reshape(group.bundles, -1).sum(1)
        on_progress(len(groups), len(groups))

    def losses(self, on_progress: ProgressCallback = ignore_progress) -> dict[str, Curve]:
        return {group.name: dropped_importance(group, self._shares(group)) for group in self.inputs.groups}

    def kept(self, group: PrunableGroup, count: int) -> tuple[int, ...]:
        order = by_importance(self._importance[group.name], group.parts)
        return units_without(group, order[: group.dropped_bundles(count)])

    def finish(self, counts: Mapping[str, int], on_progress: ProgressCallback = ignore_progress) -> None:
        self.require_counts(counts)
        groups = self.inputs.groups
        for number, group in enumerate(groups):
            on_progress(number, len(groups))
            kept = self.kept(group, counts[group.name])
            scale_units(linear_of(self.inputs.model, group), group, kept, np.ones(len(kept)))
        on_progress(len(groups), len(groups))

    def _shares(self, group: PrunableGroup) -> np.ndarray:
        """The importances of a group, of which the sum is one unless all are zero."""
        importance = self._importance[group.name]
        return importance / (importance.sum() or 1.0)
