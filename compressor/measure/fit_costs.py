"""Fit a table of times to the times of engines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.linalg import lstsq
from scipy.optimize import isotonic_regression

from compressor.measure.costs import CostTable, GroupCosts

Point = tuple[Mapping[str, int], float]
"""Number of units of each group that a plan keeps, and its time in milliseconds."""
_EXACTNESS = 100.0
"""Weight of the whole model among plans, whose time a table has exactly."""
_NOISE_SHARE = 1e-3
"""Share of the time of the whole model below which a sum of costs is noise."""
_LEAST_SPREAD = 1e-3
"""Range of the logarithms of sums above which their ratios to times are fitted with a slope."""


def fit_times(
    table: CostTable, points: Sequence[Point], fitted: Sequence[int], errors: Sequence[float] = ()
) -> CostTable:
    """The table whose sums are closest to the times of plans, in relative terms.

    The time of a plan is taken as that of a plan without units, and for each group a cost for each interval between its
    numbers of units in the table. Costs are fitted by least squares of relative errors, so that a small plan counts as
    much as a large one. An interval whose cost is negative is a cliff, or noise (`GroupCosts`).

    Args:
        table: the time of the whole model, and rows with the numbers of units between which costs are linear.
        points: the plans, and their times.
        fitted: indices of the rows that are fitted; the others keep their costs.
        errors: standard error of each of the times; empty: unknown.
    """
    rows = {index: table.rows[index] for index in fitted}
    fixed = [row for index, row in enumerate(table.rows) if index not in rows]
    whole = {name: row.counts[-1] for row in table.rows for name in row.groups}
    plans, times = zip(*points, (whole, table.whole), strict=True)
    known = [sum(row.saving(0) - row.saving(counts[name]) for row in fixed for name in row.groups) for counts in plans]
    weights = np.array([1.0] * len(points) + [_EXACTNESS]) / np.array(times)
    design = np.array([[1.0, *(part for row in rows.values() for part in _intervals(row, counts))] for counts in plans])
    design, relative = design * weights[:, None], (np.array(times) - known) * weights
    costs = lstsq(design, relative)[0]
    ends = np.cumsum([1, *(len(row.counts) - 1 for row in rows.values())])
    spread = _errors_of_costs(design, relative - design @ costs, weights[:-1] * errors) if errors else None
    rows = {
        index: _with_costs(row, costs[start:end], () if spread is None else spread[start:end].tolist())
        for (index, row), (start, end) in zip(rows.items(), itertools.pairwise(ends), strict=True)
    }
    return table.model_copy(update={"rows": tuple(rows.get(index, row) for index, row in enumerate(table.rows))})


def _intervals(row: GroupCosts, counts: Mapping[str, int]) -> np.ndarray:
    """For each interval of a row, the number of groups that keep its units, in parts where they keep some of them."""
    low, high = np.array(row.counts[:-1]), np.array(row.counts[1:])
    kept = np.array([counts[name] for name in row.groups])[:, None]
    parts: np.ndarray = ((kept - low) / (high - low)).clip(0, 1).sum(axis=0)
    return parts


def _errors_of_costs(design: np.ndarray, residuals: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Standard errors of fitted costs; larger in proportion where residuals exceed what the errors of times explain.

    Args:
        design: the weighted design, whose last row is the whole model.
        residuals: relative errors of the fit.
        errors: relative standard errors of the times of the plans.
    """
    errors = np.append(errors, 0.0)  # other times are relative to that of the whole model
    inverse = np.linalg.pinv(design)
    expected = float(np.square((np.eye(len(design)) - design @ inverse) * errors).sum())
    excess = float(np.square(residuals).sum()) / expected if expected > 0 else 1.0
    spread: np.ndarray = np.sqrt(max(1.0, excess) * np.square(inverse * errors).sum(axis=1))
    return spread


def _with_costs(row: GroupCosts, costs: np.ndarray, errors: Sequence[float]) -> GroupCosts:
    """A row whose intervals cost what was fitted."""
    savings = [*np.cumsum(costs[::-1])[::-1].tolist(), 0.0]
    # An empty group computes nothing, so that what it takes longer by is noise.
    return row.with_savings([max(savings), *savings[1:]], errors)


def with_curve(table: CostTable, least: float, points: Sequence[Point]) -> CostTable:
    """The table with a curve from sums of costs to times, fitted to plans in which every group keeps another share.

    An engine whose layers differ takes longer than the sum of its parts, which were timed in engines of equal layers;
    the difference is larger for smaller engines. The ratio is taken as a power of the sum. The ends of the curve are
    the plan that keeps nothing and the whole model.

    Args:
        table: a table of times.
        least: time of the plan that keeps nothing.
        points: the plans, and their times.
    """
    ordered = sorted((table.sum_of(counts), time) for counts, time in points)
    sums, measured = np.array(ordered).clip(_NOISE_SHARE * table.whole).T
    logs = np.log(sums)
    power = np.polynomial.Polynomial.fit(logs, np.log(measured / sums), int(np.ptp(logs) > _LEAST_SPREAD))
    least = min(least, table.whole)
    times = [least, *(sums * np.exp(power(logs))), table.whole]
    fitted = isotonic_regression(times).x.clip(least, table.whole).tolist()
    ends = [table.least_sum, *(total for total, _ in ordered), table.whole]
    return table.model_copy(update={"curve": tuple(zip(ends, fitted, strict=True))})
