"""Fit a table of times to the times of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.linalg import lstsq
from scipy.optimize import isotonic_regression

from compressor.measure.costs import CostTable, GroupCosts

Point = tuple[Mapping[str, int], float]
"""Number of units of each group that a plan keeps, and its time in milliseconds."""
_EXACTNESS = 100.0
"""Weight of the whole model among plans, whose time a table has exactly."""


def fit_times(table: CostTable, points: Sequence[Point], *, least_share: float = 0.0) -> CostTable:
    """The table whose sums are closest to the times of plans, in relative terms.

    The time of a plan is taken as that of a plan without units, and for each group a cost for each interval between its
    numbers of units in the table. Costs are fitted by least squares of relative errors, so that a small plan counts as
    much as a large one. An interval whose cost is negative is a cliff, or noise (`GroupCosts`).

    Args:
        table: the time of the whole model, and rows with the numbers of units between which costs are linear.
        points: the plans, and their times.
        least_share: share of the time of the whole model below which the costs of a row are kept as they are.
    """
    is_fitted = [len(row.groups) * row.saving(0) >= least_share * table.whole for row in table.rows]
    fitted = [row for row, fits in zip(table.rows, is_fitted, strict=True) if fits]
    others = [row for row, fits in zip(table.rows, is_fitted, strict=True) if not fits]
    whole = {name: row.counts[-1] for row in table.rows for name in row.groups}
    plans, times = zip(*points, (whole, table.whole), strict=True)
    known = [sum(row.saving(0) - row.saving(counts[name]) for row in others for name in row.groups) for counts in plans]
    weights = np.array([1.0] * len(points) + [_EXACTNESS]) / np.array(times)
    design = np.array([[1.0, *(part for row in fitted for part in _intervals(row, counts))] for counts in plans])
    costs = lstsq(design * weights[:, None], (np.array(times) - known) * weights)[0][1:]
    parts = iter(np.split(costs, np.cumsum([len(row.counts) - 1 for row in fitted])))
    rows = tuple(
        _with_costs(row, next(parts)) if fits else row for row, fits in zip(table.rows, is_fitted, strict=True)
    )
    return table.model_copy(update={"rows": rows})


def _intervals(row: GroupCosts, counts: Mapping[str, int]) -> np.ndarray:
    """For each interval of a row, the number of groups that keep its units, in parts where they keep some of them."""
    low, high = np.array(row.counts[:-1]), np.array(row.counts[1:])
    kept = np.array([counts[name] for name in row.groups])[:, None]
    parts: np.ndarray = ((kept - low) / (high - low)).clip(0, 1).sum(axis=0)
    return parts


def _with_costs(row: GroupCosts, costs: np.ndarray) -> GroupCosts:
    """A row whose intervals cost what was fitted."""
    return row.with_savings([*np.cumsum(costs[::-1])[::-1].tolist(), 0.0])


def with_curve(table: CostTable, least: float, points: Sequence[Point]) -> CostTable:
    """The table with a curve from sums of costs to times, fitted to plans in which every group keeps another share.

    An engine whose layers differ takes longer than the sum of its parts, which were timed in engines of equal layers;
    the more so, the smaller it is. The ratio is taken as a power of the sum. The ends of the curve are the plan that
    keeps nothing and the whole model.

    Args:
        table: a table of times.
        least: time of the plan that keeps nothing.
        points: the plans, and their times.
    """
    sums = np.array(sorted(table.sum_of(counts) for counts, _ in points))
    measured = np.array([time for _, time in sorted(points, key=lambda point: table.sum_of(point[0]))])
    exponent, factor = np.polyfit(np.log(sums), np.log(measured / sums), 1)
    least = min(least, table.whole)
    times = np.append(sums * np.exp(factor) * sums**exponent, table.whole)
    ends = np.array([table.least_sum, *sums, table.whole])
    fitted = isotonic_regression([least, *times]).x.clip(least, table.whole)
    return table.model_copy(update={"curve": tuple(zip(ends.tolist(), fitted.tolist(), strict=True))})
