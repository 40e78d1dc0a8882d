"""Mask tuning: one scale for each kept unit, by which a linear reproduces its targets best.

Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers", section 4.3 and its published code.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from scipy.sparse.linalg import lsmr

from compressor.selection.pruners.layerwise.in_order import TargetedCall
from compressor.selection.pruners.layerwise.refit import RefitStatistics
from compressor.units import PrunableGroup
from compressor.units.layers import Linear, linear_sizes, linear_weight, unit_columns

DAMP = 1.0
"""Weight of the squared distance of the scales from one, against the squared residual of the normal equations."""
LARGEST = 10.0
"""Largest magnitude of a scale; a solution beyond it is unstable."""


def tuned_scales(
    linear: Linear, group: PrunableGroup, kept: tuple[int, ...], calls: Iterable[TargetedCall]
) -> np.ndarray:
    """The scales of the kept units of a group.

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
    statistics = RefitStatistics(len(columns), linear_sizes(linear)[1], has_ones=False, name=group.name)
    for call in calls:
        targets = call.targets if linear.bias is None else call.targets - linear.bias.detach()
        statistics.add(call.inputs[:, columns.to(call.inputs.device)], targets)
    weight = linear_weight(linear).detach().double().cpu().numpy()[:, columns]
    starts = np.arange(0, len(columns), group.bundle * group.width)
    contributions = np.add.reduceat((weight.T @ weight) * statistics.gram.matrix, starts, 1)
    normal = np.add.reduceat(contributions, starts, 0)
    right = np.add.reduceat((weight.T * statistics.cross).sum(1), starts) - normal.sum(1)
    shifts = lsmr(normal, right, damp=DAMP)[0]
    falls = shifts @ normal @ shifts < 2 * shifts @ right
    if not falls or np.abs(1 + shifts).max() > LARGEST:
        shifts = np.zeros(len(starts))
    return (1 + shifts).repeat(group.bundle)
