"""Units ranked by one importance each: which a group keeps, what it drops, and its linear without the dropped units.

Units that a group keeps or drops together (`PrunableGroup.bundle`) have one importance.
"""

from __future__ import annotations

import numpy as np
import torch

from compressor.selection.pruner import Curve
from compressor.units import PrunableGroup
from compressor.units.layers import Linear, linear_weight


def bundles_of(group: PrunableGroup) -> int:
    """Number of bundles of a group."""
    return group.units // group.bundle


def by_importance(importance: np.ndarray) -> np.ndarray:
    """Bundles from the least important to the most important; of equal ones the first comes first."""
    return np.argsort(importance, kind="stable")


def units_without(group: PrunableGroup, dropped: np.ndarray) -> tuple[int, ...]:
    """Ids of the units of all bundles but the dropped ones, ascending."""
    kept = np.ones(bundles_of(group), bool)
    kept[dropped] = False
    return tuple(np.flatnonzero(kept.repeat(group.bundle)).tolist())


def dropped_importance(group: PrunableGroup, importance: np.ndarray) -> Curve:
    """Number of units -> the sum of the importances of the bundles that are dropped, the least important first."""
    sums = np.concatenate([[0.0], np.cumsum(np.sort(importance))])
    return {count: float(sums[len(importance) - count // group.bundle]) for count in group.counts}


def scale_units(linear: Linear, group: PrunableGroup, kept: tuple[int, ...], scales: np.ndarray) -> None:
    """Multiply the columns of kept units by a scale each, and set those of dropped units to zero.

    Args:
        linear: the linear that reads the units.
        group: their group.
        kept: ids of the kept units.
        scales: scale of each kept unit.
    """
    gates = np.zeros(group.units)
    gates[list(kept)] = scales
    columns = torch.from_numpy(gates.repeat(group.width))
    with torch.no_grad():
        weight = linear_weight(linear)
        products = weight.double() * columns.to(weight.device)
        weight.copy_(products.masked_fill(columns.to(weight.device) == 0, 0.0))  # zero times an infinite weight is none
