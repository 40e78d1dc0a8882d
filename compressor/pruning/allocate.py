"""The number of units of each group that meets constraints on the cost of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from compressor.errors import BudgetError, ErrorCode, InputError
from compressor.pruning.constraints import Constraint, require_reachable
from compressor.results import Note
from compressor.selection.allocation import Curve, allocate, require_finite_losses
from compressor.units import PrunableGroup

MAX_BUDGET_RATIO = 1.02
"""Ratio of measured cost to budget up to which a budget is met: repeated measurements differ by as much."""
MIN_BUDGET_RATIO = 0.97
"""Ratio of measured cost to budget below which a plan leaves too much of its budget."""
AIMED_RATIO = 0.985
"""Ratio of measured time to budget that plans are allocated for: a time that is measured again may be longer."""
MAX_ATTEMPTS = 6
"""Maximum number of plans that are measured."""


@dataclass(frozen=True)
class Allocation:
    """Numbers of units that meet constraints.

    Attributes:
        counts: name of the group -> number of units that are kept.
        predicted: cost under each constraint, by its table.
        measured: the same, measured; equal to `predicted` for costs that are counted.
        notes: facts about the weights that the model has with these numbers.
    """

    counts: Mapping[str, int]
    predicted: tuple[float, ...]
    measured: tuple[float, ...]
    notes: tuple[Note, ...] = ()


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
        measure: called at most `MAX_ATTEMPTS` times with the number of units of each group; returns the cost of the
            plan under each constraint, in their order and units.

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

    while len(attempts) < MAX_ATTEMPTS:
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
