"""Remove heads and neurons until budgets are met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compressor.measure.costs import CostTable
from compressor.progress import RunLog
from compressor.pruning.allocate import (
    MAX_BUDGET_RATIO,
    MIN_BUDGET_RATIO,
    Allocation,
    Budgets,
    Constraint,
    allocate_until_met,
    keep_all_within,
    macs_of,
    require_reachable,
)
from compressor.pruning.measure import KeptTimes
from compressor.report.budgets import cost, quantity
from compressor.results import Note, NoteCode
from compressor.selection.allocation import Curve
from compressor.units import PrunableGroup

if TYPE_CHECKING:  # tables and budgets are read where PyTorch is missing
    from compressor.selection.pruners.base import Pruner

RANKING_STAGES = ("gathering statistics of the rows", "measuring what each group contributes")
"""Stages whose results are kept for further plans of a model with the same weights."""


@dataclass(frozen=True)
class PlanCosts:
    """What plans cost.

    Attributes:
        times: measures the times of plans.
        counted: tables of parameters and multiply-accumulates.
        timed: tables of times at each size; empty where nothing depends on times.
        deciding: tables by which alone a plan meets a budget of time; empty: engines of plans are timed until one
            meets it.
    """

    times: KeptTimes
    counted: Sequence[CostTable]
    timed: Sequence[CostTable] = ()
    deciding: Sequence[CostTable] = ()


@dataclass(frozen=True)
class Pruned:
    """How many units each group keeps, and what that costs.

    Attributes:
        allocation: the numbers of units.
        tables: tables of the whole model that show where the cost goes.
        constraints: the budgets.
    """

    allocation: Allocation
    tables: tuple[CostTable, ...]
    constraints: tuple[Constraint, ...]


def plan_costs(times: KeptTimes, groups: Sequence[PrunableGroup], budgets: Budgets, *, is_timed: bool) -> PlanCosts:
    """What plans cost, counted, and measured where that is needed.

    Raises:
        BudgetError: a budget is below the cost of a plan that keeps nothing of the groups. This is known before the
            rows are read, which takes longer.
    """
    counted = times.costs.count_tables()
    require_reachable(groups, budgets.constraints(counted))
    if not is_timed:
        return PlanCosts(times, counted)
    timed = times.time_tables(macs_of(counted))
    times.costs.release()
    require_reachable(groups, budgets.constraints(timed))
    return PlanCosts(times, counted, timed)


def prune(
    pruner: Pruner[Any], groups: Sequence[PrunableGroup], costs: PlanCosts, budgets: Budgets, log: RunLog
) -> Pruned:
    """Remove units, and give the model the remaining weights.

    Args:
        pruner: the method, whose model has the weights of the whole model.

    Raises:
        InputError: a loss or a measured cost is not finite.
        BudgetError: no plan meets the budgets.
    """

    def losses() -> dict[str, Curve]:
        ranking, measuring = RANKING_STAGES
        with log.stage(ranking) as on_progress:
            pruner.rank(on_progress)
        with log.stage(measuring) as on_progress:
            return pruner.losses(on_progress)

    constraints = budgets.constraints([*costs.counted, *(costs.deciding or costs.timed)])

    def measure(counts: Mapping[str, int]) -> list[float]:
        """The cost under each constraint: by its table, or timed beside the dense engine."""
        is_timed = bool(costs.timed and not costs.deciding)
        times = iter(costs.times.time_plan({**budgets.fixed, **counts}, costs.timed) if is_timed else ())
        return [
            next(times) if is_timed and part.table.unit == "ms" else part.table.cost(counts) for part in constraints
        ]

    allocation = keep_all_within(groups, constraints, measure)
    if allocation is None:  # losses are measured only if units have to be removed
        allocation = allocate_until_met(groups, losses(), constraints, measure)
    costs.times.costs.release()
    if not costs.deciding:
        log.add_notes(budget_notes(constraints, allocation))
    if removes_any(groups, allocation):
        with log.stage("refitting the remaining weights") as on_progress:
            pruner.finish(allocation.counts, on_progress)
        allocation = replace(allocation, notes=pruner.notes)
    shown = (*costs.timed, *(table for table in costs.counted if table.unit == "macs"))
    return Pruned(allocation, shown, tuple(constraints))


def removes_any(groups: Sequence[PrunableGroup], allocation: Allocation) -> bool:
    """Whether a group keeps fewer units than it has."""
    return any(allocation.counts[group.name] < group.counts[-1] for group in groups)


def budget_notes(constraints: Sequence[Constraint], allocation: Allocation) -> Iterator[Note]:
    """What was requested and what was reached."""
    whole = [constraint.table.cost({}) for constraint in constraints]
    is_whole = all(cost >= most for cost, most in zip(allocation.predicted, whole, strict=True))
    if is_whole:
        uses = ", ".join(
            f"{cost(most, part.table.unit)} of {quantity(part.budget, part.table.unit)}"
            for part, most in zip(constraints, whole, strict=True)
        )
        text = f"the model meets the budget as it is ({uses}), so no unit is removed for it"
        yield Note(code=NoteCode.BUDGET_ABOVE_DENSE, text=text)
    for constraint, predicted, measured in zip(constraints, allocation.predicted, allocation.measured, strict=True):
        table, used = constraint.table, constraint.usage(measured)
        size = f"{table.size_label}: " if table.batch else ""
        expected = f"; predicted {cost(predicted, table.unit)}" if table.unit == "ms" else ""
        text = (
            f"{size}{quantity(constraint.budget, table.unit)} allowed, {cost(measured, table.unit)} reached"
            f" ({measured / table.dense:.1%} of {cost(table.dense, table.unit)} with every unit, {used:.1%} of the"
            f" budget{expected})"
        )
        code = NoteCode.BUDGET_MET if used <= MAX_BUDGET_RATIO else NoteCode.BUDGET_MISSED
        if code is NoteCode.BUDGET_MET and used < MIN_BUDGET_RATIO and not is_whole:
            text += "; another size or the next number of units bounds the plan"
        yield Note(code=code, text=text)
