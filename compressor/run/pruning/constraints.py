"""Constraints on the cost of a plan: those that a step sets, and the tables and sizes that they hold for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compressor.config.sections import MeasureConfig
from compressor.config.steps import Units
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.measure.costs import CostTable, GroupCosts
from compressor.run.pruning.measure_times import Size
from compressor.units import PrunableGroup


@dataclass(frozen=True)
class Constraint:
    """A bound on the cost of a plan.

    Attributes:
        table: what plans cost.
        budget: the bound, in the unit of the table: ms of a call, multiply-accumulates, parameters or heads.
        correction: what costs of the table are multiplied by, from the plans that were measured.

    Raises:
        InputError: the budget or the correction is not finite, or negative.
    """

    table: CostTable
    budget: float
    correction: float = 1.0

    def __post_init__(self) -> None:
        for name in ("budget", "correction"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(
                    f"{name} {value}: no cost of a plan; give a finite number that is not negative",
                    code=ErrorCode.INVALID_VALUE,
                    field=name,
                    value=value,
                )

    def predicted_cost(self, counts: Mapping[str, int]) -> float:
        """The cost of a plan, from the number of units of each group."""
        return self.correction * self.table.cost(counts)

    def usage(self, cost: float) -> float:
        """Ratio of a cost to the budget; infinite for a cost above a budget of zero, e.g. of no heads."""
        if self.budget > 0:
            return cost / self.budget
        return math.inf if cost > 0 else 1.0

    @property
    def limit(self) -> float:
        """The sum of costs by the table up to which a plan meets the budget."""
        return self.table.sum_at(self.budget / self.correction)

    def with_correction(self, points: Sequence[tuple[float, float]]) -> Constraint:
        """The constraint with the correction at which a plan is expected to cost as much as the budget.

        Costs that are counted need none. The closest plans that cost less and more than the budget are interpolated, in
        logarithms; where all cost less or all more, costs are corrected in proportion to those of the closest.

        Args:
            points: predicted and measured cost of each plan that was measured.
        """
        if self.table.unit != "ms":
            return self
        under = max((point for point in points if point[1] <= self.budget), key=lambda point: point[1], default=None)
        over = min((point for point in points if point[1] > self.budget), key=lambda point: point[1], default=None)
        if under is None or over is None:
            predicted, measured = min(points, key=lambda point: abs(math.log(point[1] / self.budget)))
            return replace(self, correction=measured / predicted)
        (low, low_measured), (high, high_measured) = under, over
        share = math.log(self.budget / low_measured) / math.log(high_measured / low_measured)
        return replace(self, correction=self.budget / (low ** (1 - share) * high**share))


def timed_sizes(step: Units, measure: MeasureConfig, lengths: Sequence[int | None]) -> list[Size]:
    """The sizes at which budgets hold.

    Args:
        step: the budgets.
        measure: the batch sizes that are timed.
        lengths: the lengths that are timed.

    Raises:
        UsageError: a size of `budget_at` is not timed.
    """
    sizes: list[Size] = list(itertools.product(measure.batch, lengths))
    requested = [tuple(map(int, shape.split("x"))) for shape in step.budget_at]
    for shape in requested:
        if shape not in sizes:
            raise UsageError(
                f"--budget-at {'x'.join(map(str, shape))}: this size is not timed; add it to --batch and --seq",
                code=ErrorCode.CONTRADICTION,
                field="budget_at",
                value=shape,
            )
    return [size for size in sizes if not requested or size in requested]


def constraints_of(step: Units, tables: Sequence[CostTable], heads: int) -> list[Constraint]:
    """The constraints that a step sets.

    Args:
        step: the budgets.
        tables: tables of every unit, at the sizes at which budgets hold.
        heads: number of heads to keep, for a table of heads.
    """
    constraints: list[Constraint] = []
    for table in tables:
        bound: float | None = None
        if table.unit == "ms":
            bound = table.dense / step.speedup if step.speedup is not None else step.milliseconds
        elif table.unit == "heads":
            bound = heads
        else:
            share = step.macs if table.unit == "macs" else step.parameters
            bound = None if share is None else share * table.dense
        if bound is not None:
            constraints.append(Constraint(table, bound))
    return constraints


def head_table(groups: Sequence[PrunableGroup]) -> CostTable:
    """The table of a budget of heads: each head costs one."""
    rows = tuple(
        GroupCosts(groups=(group.name,), type="heads", counts=(0, group.units), savings=(float(group.units), 0.0))
        for group in groups
        if group.type == "heads"
    )
    total = float(sum(row.savings[0] for row in rows))
    return CostTable(unit="heads", dense=total, whole=total, rows=rows)


def macs_of(counted: Sequence[CostTable]) -> CostTable:
    """The table of multiply-accumulates at the first size."""
    return next(table for table in counted if table.unit == "macs")
