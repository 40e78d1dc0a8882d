"""The method `magnitude`: units by the norm of the weights that read them, as a baseline."""

from __future__ import annotations

import numpy as np

from compressor.selection.options import MethodOptions
from compressor.selection.pruners.unit_importance import ImportancePruner
from compressor.units import PrunableGroup
from compressor.units.groups import linear_of
from compressor.units.layers import linear_weight


class MagnitudePruner(ImportancePruner[MethodOptions]):
    """Removes the units that are read with the smallest weights; see `ImportancePruner`.

    The importance of a unit is the squared norm of its columns in the linear that reads it: plain weight magnitude, as
    simple tools compute it. Weights that produce the unit, and activations, are not considered, so no row is read.
    """

    options_class = MethodOptions
    reads_rows = False

    def importance(self, group: PrunableGroup) -> np.ndarray:
        weight = linear_weight(linear_of(self.inputs.model, group)).detach().double().cpu().numpy()
        return np.square(weight).sum(0).reshape(group.bundles, -1).sum(1)
