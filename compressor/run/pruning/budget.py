"""Budgets of a run: constraints on the cost of a plan, and the number of units of each group that meets them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from compressor.config.run import Recipe
from compressor.errors import BudgetError, ErrorCode, InputError, UsageError
from compressor.measure.costs import CostTable, GroupCosts
from compressor.results import BudgetRow, CertifiedLoss, Note
from compressor.run.pruning.measure_times import Size
from compressor.run.pruning.unreachable_budgets import unreachable
from compressor.selection.allocation import Curve, allocate, require_finite_losses
from compressor.units import PrunableGroup

MAX_BUDGET_RATIO = 1.02
"""Ratio of measured cost to budget up to which a budget is met: repeated measurements differ by as much."""
MIN_BUDGET_RATIO = 0.97
"""Ratio of measured cost to budget below which a plan leaves too much of its budget."""
AIMED_RATIO = 0.985
"""Ratio of measured time to budget that plans are allocated for: a time that is measured again may be longer."""
MAX_ROUNDS = 6
"""Maximum number of plans that are measured."""


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


@dataclass(frozen=True)
class Allocation:
    """Numbers of units that meet constraints.

    Attributes:
        counts: name of the group -> number of units that are kept.
        predicted: cost under each constraint, by its table.
        measured: the same, measured; equal to `predicted` for costs that are counted.
        budget: the rows of the report.
        tables: tables of the whole model that show where the cost goes.
        certificate: the loss that is certified; None where no certificate was requested.
        notes: facts about the weights that the model has with these numbers.
    """

    counts: Mapping[str, int]
    predicted: tuple[float, ...]
    measured: tuple[float, ...]
    budget: tuple[BudgetRow, ...] = ()
    tables: tuple[CostTable, ...] = ()
    certificate: CertifiedLoss | None = None
    notes: tuple[Note, ...] = ()


def timed_sizes(recipe: Recipe, lengths: Sequence[int | None]) -> list[Size]:
    """The sizes at which budgets hold.

    Raises:
        UsageError: a size of `budget_at` is not timed.
    """
    sizes: list[Size] = list(itertools.product(recipe.measure.batch, lengths))
    requested = [tuple(map(int, shape.split("x"))) for shape in recipe.budget.budget_at]
    for shape in requested:
        if shape not in sizes:
            raise UsageError(
                f"--budget-at {'x'.join(map(str, shape))}: this size is not timed; add it to --batch and --seq",
                code=ErrorCode.CONTRADICTION,
                field="budget_at",
                value=shape,
            )
    return [size for size in sizes if not requested or size in requested]


def constraints_of(recipe: Recipe, tables: Sequence[CostTable], heads: int) -> list[Constraint]:
    """The constraints that a recipe sets.

    Args:
        recipe: the recipe.
        tables: tables of every unit, at the sizes at which budgets hold.
        heads: number of heads to keep, for a table of heads.
    """
    budget = recipe.budget
    constraints: list[Constraint] = []
    for table in tables:
        bound: float | None = None
        if table.unit == "ms":
            bound = table.dense / budget.speedup if budget.speedup is not None else budget.milliseconds
        elif table.unit == "heads":
            bound = heads
        else:
            share = budget.macs if table.unit == "macs" else budget.parameters
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


def choose_counts(
    groups: Sequence[PrunableGroup], losses: Mapping[str, Curve], constraints: Sequence[Constraint]
) -> dict[str, int]:
    """The numbers of units that lose least within the constraints.

    Args:
        groups: the groups whose units may be removed; all others keep theirs.
        losses: name of the group -> loss at every number of units.
        constraints: the constraints.

    Raises:
        BudgetError: no plan meets the constraints.
        InputError: a loss is NaN or infinite.
    """
    for group in groups:
        require_finite_losses(group.name, losses[group.name])
    require_reachable(groups, constraints)
    nothing = {group.name: 0 for group in groups}
    costs, limits = [], []
    for constraint in constraints:
        table = constraint.table
        empty = {group.name: table.saving(group.name, 0) for group in groups}
        costs.append(
            [
                {count: empty[group.name] - table.saving(group.name, count) for count in losses[group.name]}
                for group in groups
            ]
        )
        limits.append(max(0.0, constraint.limit - table.sum_of(nothing)))
    counts = allocate([losses[group.name] for group in groups], costs, limits)
    return {group.name: count for group, count in zip(groups, counts, strict=True)}


def require_reachable(groups: Sequence[PrunableGroup], constraints: Sequence[Constraint]) -> None:
    """Raise BudgetError for a budget below the cost of a plan that keeps nothing of the groups."""
    least = [constraint.predicted_cost({group.name: 0 for group in groups}) for constraint in constraints]
    if any(constraint.budget < cost for constraint, cost in zip(constraints, least, strict=True)):
        budgets, tables = zip(*((part.budget, part.table.scaled(part.correction)) for part in constraints), strict=True)
        raise unreachable(budgets, tables, least, {group.name for group in groups})


def keep_all_within(
    groups: Sequence[PrunableGroup],
    constraints: Sequence[Constraint],
    measure: Callable[[Mapping[str, int]], Sequence[float]],
) -> Allocation | None:
    """The plan that keeps every unit, if it meets the budgets as measured; None: units have to be removed.

    Args:
        groups: the groups whose units may be removed.
        constraints: the constraints.
        measure: measures the cost of a plan under each constraint.
    """
    counts = {group.name: group.counts[-1] for group in groups}
    predicted = tuple(constraint.table.cost(counts) for constraint in constraints)
    if any(constraint.usage(cost) > 1 for constraint, cost in zip(constraints, predicted, strict=True)):
        return None
    measured = _costs(measure(counts), constraints)
    exceeds = any(constraint.usage(cost) > 1 for constraint, cost in zip(constraints, measured, strict=True))
    return None if exceeds else Allocation(counts, predicted, measured)


def allocate_until_met(
    groups: Sequence[PrunableGroup],
    losses: Mapping[str, Curve],
    constraints: Sequence[Constraint],
    measure: Callable[[Mapping[str, int]], Sequence[float]],
) -> Allocation:
    """Allocate units, measure the plan, correct the costs by what was measured, and allocate again until it fits.

    Args:
        groups: the groups whose units may be removed.
        losses: name of the group -> loss at every number of units.
        constraints: the constraints.
        measure: called at most six times with the number of units of each group; returns the cost of the plan under
            each constraint, in their order and units.

    Returns:
        Of the plans that were measured to meet the budgets within `MAX_BUDGET_RATIO`, the plan whose cost is closest to
        `AIMED_RATIO`; where none meets them, the plan that exceeds them least.

    Raises:
        BudgetError: no plan meets the constraints; `details["least"]` has the least cost under each.
        InputError: a loss or a measured cost is not finite, or a plan has another number of costs than constraints.
    """
    attempts: list[Allocation] = []

    def usage(attempt: Allocation) -> float:
        return max(limit.usage(cost) for cost, limit in zip(attempt.measured, constraints, strict=True))

    while len(attempts) < MAX_ROUNDS:
        counts = _next_counts(groups, losses, constraints, attempts)
        if counts is None:
            break
        predicted = tuple(constraint.table.cost(counts) for constraint in constraints)
        attempts.append(Allocation(counts, predicted, _costs(measure(counts), constraints)))
        used = usage(attempts[-1])
        keeps_all = all(counts[group.name] == group.counts[-1] for group in groups)
        if used <= 1 and (used >= MIN_BUDGET_RATIO or keeps_all):
            break
    met = [attempt for attempt in attempts if usage(attempt) <= MAX_BUDGET_RATIO]
    return min(met, key=lambda attempt: abs(usage(attempt) - AIMED_RATIO)) if met else min(attempts, key=usage)


def _costs(measured: Sequence[float], constraints: Sequence[Constraint]) -> tuple[float, ...]:
    """What a plan costs under each constraint; raise InputError for values that are no costs."""
    costs = tuple(measured)
    if len(costs) != len(constraints) or not all(
        math.isfinite(cost) and (cost > 0 or constraint.table.unit != "ms")
        for cost, constraint in zip(costs, constraints, strict=False)
    ):
        raise InputError(
            f"a plan was measured to cost {list(costs)} under {len(constraints)} constraints; return one finite cost"
            " for each, and times above zero",
            code=ErrorCode.INVALID_VALUE,
            field="measure",
            value=list(costs),
        )
    return costs


def _next_counts(
    groups: Sequence[PrunableGroup],
    losses: Mapping[str, Curve],
    constraints: Sequence[Constraint],
    attempts: Sequence[Allocation],
) -> dict[str, int] | None:
    """The numbers of units that are measured next; None if all plans that qualify were."""
    if not attempts and all(constraint.predicted_cost({}) <= constraint.budget for constraint in constraints):
        return {group.name: group.counts[-1] for group in groups}
    for share in (AIMED_RATIO, 1.0):
        current = [
            replace(part, budget=share * part.budget) if part.table.unit == "ms" else part for part in constraints
        ]
        if attempts:
            current = [
                constraint.with_correction([(plan.predicted[index], plan.measured[index]) for plan in attempts])
                for index, constraint in enumerate(current)
            ]
        try:
            counts = choose_counts(groups, losses, current)
        except BudgetError:
            if share < 1:
                continue
            if not attempts:
                raise
            # By the corrected costs no plan meets the budget, but the smallest may need less correction.
            counts = {group.name: 0 for group in groups}
        if all(attempt.counts != counts for attempt in attempts):
            return counts
    return None
