"""Cost tables: the cost of a group of units for each number of kept units, and the cost of a plan.

Tables of times are fitted to the times of engines.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from compressor.results import WHOLE_MODEL, CostUnit, Phase, Size, size_label

CLIFF = 1.05
"""A number of units is a cliff if a larger number is faster, and the ratio of their times is at least this."""
_ERRORS_OF_CLIFF = 4.0
"""Standard errors that the difference of the times at a cliff has to exceed."""
Point = tuple[Mapping[str, int], float]
"""Number of units that a plan keeps of each group, and its time in milliseconds."""
_EXACTNESS = 100.0
"""Weight of the whole model in a fit, so large that the fitted table has its time."""
_NOISE_SHARE = 1e-3
"""Share of the time of the whole model below which a sum of costs is noise."""
_LEAST_SPREAD = 1e-3
"""Range of the logarithms of sums below which the ratios of times to sums are fitted without a slope."""


class GroupCosts(BaseModel):
    """Costs of equal groups at some numbers of units.

    Attributes:
        groups: names of the groups that share the row.
        type: `heads` or `neurons`.
        counts: numbers of units that were measured, in ascending order; the last number is all units.
        savings: what each of the groups saves with each number of units; the last saving is zero.
        errors: standard error of the difference between the savings with each number and with the next larger one;
            empty: they are exact.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups: tuple[str, ...]
    type: str
    counts: tuple[int, ...]
    savings: tuple[float, ...]
    errors: tuple[float, ...] = ()

    @functools.cached_property
    def _smoothed(self) -> tuple[float, ...]:
        """The closest savings that never grow with the number of units: fewer units are no slower, but for noise."""
        smoothed = _ascending(self.savings[::-1])[::-1]
        return tuple(float(saving - smoothed[-1]) for saving in smoothed)

    def saving(self, count: int) -> float:
        """The saving with any number of units, without noise; linear between numbers that were measured."""
        return float(np.interp(count, self.counts, self._smoothed))

    def with_savings(self, savings: Sequence[float], errors: Sequence[float] = ()) -> GroupCosts:
        """The row with other savings, and their errors."""
        # A copy would keep the smoothed savings of this row, which are cached.
        fields = {"groups": self.groups, "type": self.type, "counts": self.counts}
        return GroupCosts(**fields, savings=tuple(savings), errors=tuple(errors))

    def scaled(self, factor: float) -> GroupCosts:
        """The row with all savings multiplied by a factor."""
        savings, errors = ([factor * value for value in values] for values in (self.savings, self.errors))
        return self.with_savings(savings, errors)

    @property
    def cliffs(self) -> tuple[int, ...]:
        """Numbers of units that cost more than the next larger number that was measured, by more than noise."""
        excess = np.diff(self.savings)
        errors = np.array(self.errors) if self.errors else np.zeros_like(excess)
        least = np.maximum((CLIFF - 1) * max(self.savings), _ERRORS_OF_CLIFF * errors)
        return tuple(count for count, is_cliff in zip(self.counts, excess > least, strict=False) if is_cliff)


class CostTable(BaseModel):
    """The costs of plans of one model, in one unit and at one size.

    The cost of a plan is that of the whole model minus the savings of all groups. Times of operators that run in
    parallel or share a cache only nearly add up, so a table of times has a curve from the sum of costs to the time of
    plans with this sum.

    Attributes:
        unit: `ms` for times; `macs`, `parameters`, `heads` or `cache` for counts.
        engine: target, precision and form of the engine, e.g. `openvino int8 portable`; empty for counts.
        batch: rows in a call; 0 for counts that do not depend on it.
        seq: length in tokens; None: the model has one size.
        phase: what a model that generates does in the time; None: the graph is called once.
        dense: cost of the runtime's own engine of the whole model, which ratios refer to.
        whole: cost with every unit, in the form that plans are measured in.
        rows: the groups, each with what it saves at each number of units.
        curve: sums of costs, and costs of plans with these sums as fitted to engines, both in ascending order; empty
            where sums are exact.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: CostUnit
    engine: str = ""
    batch: int = 0
    seq: int | None = None
    phase: Phase | None = None
    dense: float
    whole: float
    rows: tuple[GroupCosts, ...]
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def least(self) -> float:
        """Cost of a plan that keeps nothing: no budget below it can be met."""
        return self.at_sum(self.least_sum)

    @property
    def least_sum(self) -> float:
        """Sum of the costs of a plan that keeps nothing."""
        return self.whole - sum(len(row.groups) * row.saving(0) for row in self.rows)

    @property
    def size(self) -> Size:
        """The size that the costs are of."""
        return Size(self.batch, self.seq, self.phase)

    @property
    def size_label(self) -> str:
        """The size in words: `batch 1, length 128`, or `whole model` for counts that have none."""
        return size_label(*self.size) if self.batch else WHOLE_MODEL

    def saving(self, group: str, count: int) -> float:
        """The saving of a group with a number of units, in the unit of the table.

        Raises:
            KeyError: no row has the group.
        """
        row = next((row for row in self.rows if group in row.groups), None)
        if row is None:
            raise KeyError(group)
        return row.saving(count)

    def sum_of(self, counts: Mapping[str, int]) -> float:
        """Sum of the costs of a plan, from the number of kept units of each group; those not named keep all."""
        return self.whole - sum(self.saving(group, count) for group, count in counts.items())

    def cost(self, counts: Mapping[str, int]) -> float:
        """Cost of a plan, from the number of kept units of each group; groups that are not named keep all."""
        return self.at_sum(self.sum_of(counts))

    def at_sum(self, total: float) -> float:
        """Cost of a plan whose costs have this sum: linear between the points of the curve."""
        return total if not self.curve else _interpolated(total, self.curve)

    def sum_at(self, cost: float) -> float:
        """The sum of costs at which a plan has this cost; the inverse of `at_sum`."""
        return cost if not self.curve else _interpolated(cost, [(after, before) for before, after in self.curve])

    def with_fixed(self, counts: Mapping[str, int]) -> CostTable:
        """The table of a model in which some groups keep fixed numbers of units.

        Args:
            counts: name of the group -> number of units. Groups that have no row are ignored.
        """
        rows = []
        for row in self.rows:
            free, fixed = (tuple(name for name in row.groups if (name in counts) is fix) for fix in (False, True))
            if free:
                rows.append(row.model_copy(update={"groups": free}))
            if fixed:
                rows.append(row.with_savings([0.0] * len(row.counts)).model_copy(update={"groups": fixed}))
        known = {name: counts[name] for row in self.rows for name in row.groups if name in counts}
        return self.model_copy(update={"whole": self.sum_of(known), "rows": tuple(rows)})

    def scaled(self, factor: float) -> CostTable:
        """The table with all costs multiplied by a factor, except that of dense."""
        rows = tuple(row.scaled(factor) for row in self.rows)
        curve = tuple((factor * total, factor * cost) for total, cost in self.curve)
        return self.model_copy(update={"whole": factor * self.whole, "rows": rows, "curve": curve})

    def share_of(self, kind: str) -> float:
        """Share of the cost of the whole model that the groups of a type account for."""
        saved = sum(len(row.groups) * row.saving(0) for row in self.rows if row.type == kind)
        return saved / self.whole


def _interpolated(value: float, points: Sequence[tuple[float, float]]) -> float:
    """The second coordinate of a curve at a value of the first; beyond the ends of the curve its slope is one."""
    first, second = zip(*points, strict=True)
    inside = min(max(value, first[0]), first[-1])
    return float(np.interp(inside, first, second)) + value - inside


def fit_times(
    table: CostTable, points: Sequence[Point], fitted: Sequence[int], errors: Sequence[float] = ()
) -> CostTable:
    """The table whose sums are closest to the times of plans, in relative terms.

    The model of the time of a plan is the time without units, plus a cost for each interval between the numbers of
    units of each group in the table. Costs are fitted by least squares of relative errors, so that a small plan counts
    as much as a large one. An interval with a negative cost is a cliff or noise (`GroupCosts`).

    Args:
        table: the time of the whole model, and rows with the numbers of units between which costs are linear.
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
    costs = np.linalg.lstsq(design, relative)[0]
    ends = np.cumsum([1, *(len(row.counts) - 1 for row in rows.values())])
    spread = _errors_of_costs(design, relative - design @ costs, weights[:-1] * errors) if errors else None
    rows = {
        index: _with_costs(row, costs[start:end], () if spread is None else spread[start:end].tolist())
        for (index, row), (start, end) in zip(rows.items(), itertools.pairwise(ends), strict=True)
    }
    return table.model_copy(update={"rows": tuple(rows.get(index, row) for index, row in enumerate(table.rows))})


def _intervals(row: GroupCosts, counts: Mapping[str, int]) -> np.ndarray:
    """For each interval of a row, the number of groups that keep its units; fractional where they keep some of them."""
    low, high = np.array(row.counts[:-1]), np.array(row.counts[1:])
    kept = np.array([counts[name] for name in row.groups])[:, None]
    return ((kept - low) / (high - low)).clip(0, 1).sum(axis=0)


def _errors_of_costs(design: np.ndarray, residuals: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Standard errors of fitted costs, scaled up where the residuals exceed what the errors of the times explain.

    The design is weighted, and its last row is the whole model; `errors` are relative to the times of the plans.
    """
    errors = np.append(errors, 0.0)  # other times are relative to that of the whole model
    inverse = np.linalg.pinv(design)
    expected = float(np.square((np.eye(len(design)) - design @ inverse) * errors).sum())
    excess = float(np.square(residuals).sum()) / expected if expected > 0 else 1.0
    return np.sqrt(max(1.0, excess) * np.square(inverse * errors).sum(axis=1))


def _with_costs(row: GroupCosts, costs: np.ndarray, errors: Sequence[float]) -> GroupCosts:
    savings = [*np.cumsum(costs[::-1])[::-1].tolist(), 0.0]
    # An empty group computes nothing, so any additional time of it is noise.
    return row.with_savings([max(savings), *savings[1:]], errors)


def with_curve(table: CostTable, least: float, points: Sequence[Point]) -> CostTable:
    """The table with a curve from sums of costs to times, fitted to plans whose groups keep different shares.

    An engine whose layers differ takes longer than the sum of its parts, which were timed in engines of equal layers;
    the difference is larger for smaller engines. The ratio of time to sum is fitted as a power of the sum. The ends of
    the curve are the plan that keeps nothing and the whole model.

    Args:
        least: time of the plan that keeps nothing.
    """
    ordered = sorted((table.sum_of(counts), time) for counts, time in points)
    sums, measured = np.array(ordered).clip(_NOISE_SHARE * table.whole).T
    logs = np.log(sums)
    power = np.polynomial.Polynomial.fit(logs, np.log(measured / sums), int(np.ptp(logs) > _LEAST_SPREAD))
    least = min(least, table.whole)
    times = [least, *(sums * np.exp(power(logs))), table.whole]
    fitted = _ascending(times).clip(least, table.whole).tolist()
    ends = [table.least_sum, *(total for total, _ in ordered), table.whole]
    return table.model_copy(update={"curve": tuple(zip(ends, fitted, strict=True))})


def _ascending(values: Sequence[float]) -> np.ndarray:
    """The closest values by least squares that never descend: neighbours that descend are replaced by their mean."""
    means, counts = list[float](), list[int]()
    for value in values:
        mean, count = float(value), 1
        while means and means[-1] >= mean:
            mean, count = mean * count + means.pop() * counts[-1], count + counts.pop()
            mean /= count
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)
