"""Constraints on the cost of a plan, the number of units of each group that meets them, and their removal."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compressor.errors import BudgetError, ErrorCode, InputError
from compressor.measure.costs import CostTable, GroupCosts
from compressor.progress import RunLog
from compressor.pruning.measure import KeptTimes
from compressor.report.budgets import UNIT_NAMES, cost, quantity
from compressor.results import Note, NoteCode
from compressor.selection.allocation import Curve, allocate, require_finite_losses
from compressor.units import PrunableGroup

if TYPE_CHECKING:  # this module is read where PyTorch is missing
    from compressor.selection.pruners.base import Pruner

SHARE = "share"
"""Unit of a table of shares of the whole model's time."""
_PARTS = {
    "heads": "heads that may not be removed",
    "neurons": "neurons that may not be removed",
    "rest": "everything else (embeddings, norms, the output)",
}
"""Parts of the least cost -> what they are called."""
MAX_BUDGET_RATIO = 1.02
"""Ratio of measured cost to budget up to which a budget is met: repeated measurements differ by as much."""
MIN_BUDGET_RATIO = 0.97
"""Ratio of measured cost to budget below which a plan leaves too much of its budget."""
AIMED_RATIO = 0.985
"""Ratio of measured time to budget that plans are allocated for: a time that is measured again may be longer."""
MAX_ATTEMPTS = 6
"""Maximum number of plans that are measured."""
RANKING_STAGES = ("gathering statistics of the rows", "measuring what each group contributes")
"""Stages whose results are kept for further plans of a model with the same weights."""


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
                text = f"{name} {value}: no cost of a plan; give a finite number that is not negative"
                raise InputError(text, code=ErrorCode.INVALID_VALUE, field=name, value=value)

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
class Budgets:
    """The bounds on the cost of a plan; None: none of this kind.

    Attributes:
        speedup: how many times as fast as dense a call is, at each size.
        milliseconds: time of a call, at each size; of a request where the model generates.
        token_milliseconds: time of a token that the model generates, at each size.
        prompt_milliseconds: time until its first token, at each size.
        macs: share of the multiply-accumulates of the whole model.
        parameters: share of its parameters.
        cache: share of the bytes that a token adds to its caches of keys and values.
        heads: number of heads of all `groups`.
        groups: every group of the model; only their heads are counted.
        fixed: name of the group -> number of units, of groups that keep what an earlier plan keeps.
    """

    speedup: float | None = None
    milliseconds: float | None = None
    token_milliseconds: float | None = None
    prompt_milliseconds: float | None = None
    macs: float | None = None
    parameters: float | None = None
    cache: float | None = None
    heads: int | None = None
    groups: Sequence[PrunableGroup] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)

    @property
    def bounds_time(self) -> bool:
        """Whether a bound is one of time."""
        times = (self.speedup, self.milliseconds, self.token_milliseconds, self.prompt_milliseconds)
        return any(time is not None for time in times)

    def timed(self, tables: Sequence[CostTable]) -> list[CostTable]:
        """The tables of times that are bounded; without a bound those of a whole call, or of a whole request."""
        if self.bounds_time:
            return [table for table in tables if self._bound(table) is not None]
        return [table for table in tables if table.phase in (None, "request")]

    def constraints(self, tables: Sequence[CostTable]) -> list[Constraint]:
        """The budgets on the costs of some tables, and on the number of heads."""
        counted = [head_table(self.groups)] if self.heads is not None else []
        bounds = [(table.with_fixed(self.fixed), self._bound(table)) for table in (*tables, *counted)]
        return [Constraint(table, bound) for table, bound in bounds if bound is not None]

    def _bound(self, table: CostTable) -> float | None:
        if table.unit in ("ms", SHARE):
            if table.phase in ("prompt", "token"):
                return self.prompt_milliseconds if table.phase == "prompt" else self.token_milliseconds
            return table.dense / self.speedup if self.speedup is not None else self.milliseconds
        if table.unit == "heads":
            return self.heads
        share = {"macs": self.macs, "parameters": self.parameters, "cache": self.cache}[table.unit]
        return None if share is None else share * table.dense


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


def require_reachable(groups: Sequence[PrunableGroup], constraints: Sequence[Constraint]) -> None:
    """Raise BudgetError for a budget below the cost of a plan that keeps nothing of the groups."""
    least = [constraint.predicted_cost({group.name: 0 for group in groups}) for constraint in constraints]
    if any(constraint.budget < cost for constraint, cost in zip(constraints, least, strict=True)):
        raise unreachable(constraints, least, {group.name for group in groups})


def unreachable(constraints: Sequence[Constraint], least: Sequence[float], removable: Collection[str]) -> BudgetError:
    """The error for budgets of which some are below the least cost, that of a plan without the removable groups."""
    budgets = [part.budget for part in constraints]
    tables = [part.table.scaled(part.correction) for part in constraints]
    exceeded = [number for number, cost in enumerate(least) if budgets[number] < cost]
    parts = [_parts(table, cost, removable) for table, cost in zip(tables, least, strict=True)]
    first = exceeded[0]
    table, minimum = tables[first], least[first]
    if table.unit == "ms":
        subject = f"at {table.size_label}"
        ratio = f" ({table.dense / minimum:.3g} times as fast as dense)" if minimum > 0 else ""
    else:
        subject, ratio = f"of {UNIT_NAMES[table.unit]}", f" ({minimum / table.dense:.1%} of dense)"
    composition = ", ".join(
        f"{_amount(parts[first][name], table)} of {text}" for name, text in _PARTS.items() if parts[first][name] > 0
    )
    return BudgetError(
        f"the budget {subject} is {_amount(budgets[first], table)}, but {_amount(minimum, table)} remain{ratio} even"
        f" when every head and neuron that may be removed is removed: {composition}; allow more",
        code=ErrorCode.BUDGET_UNREACHABLE,
        budgets=tuple(budgets),
        least=tuple(least),
        parts=tuple(parts),
        exceeded=tuple(exceeded),
    )


def _parts(table: CostTable, least: float, removable: Collection[str]) -> dict[str, float]:
    """What the cost of a plan that keeps nothing of the removable groups is made of; the parts add up to it."""
    kept = {"heads": 0.0, "neurons": 0.0}
    for row in table.rows:
        kept[row.type] += row.saving(0) * sum(name not in removable for name in row.groups)
    return {**kept, "rest": least - sum(kept.values())}


def _amount(value: float, table: CostTable) -> str:
    return f"{value:.4g} ms" if table.unit == "ms" else f"{value:,.0f}"


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
    """The numbers of units that lose least within the constraints, by the loss of each group at every number of units.

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
        table, curves = constraint.table, []
        for group in groups:
            empty = table.saving(group.name, 0)
            curves.append({count: empty - table.saving(group.name, count) for count in losses[group.name]})
        costs.append(curves)
        limits.append(max(0.0, constraint.limit - table.sum_of(nothing)))
    counts = allocate([losses[group.name] for group in groups], costs, limits)
    return {group.name: count for group, count in zip(groups, counts, strict=True)}


def keep_all_within(
    groups: Sequence[PrunableGroup],
    constraints: Sequence[Constraint],
    measure: Callable[[Mapping[str, int]], Sequence[float]],
) -> Allocation | None:
    """The plan that keeps every unit, if it meets the budgets as measured; None: units have to be removed."""
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
        text = (
            f"a plan was measured to cost {list(costs)} under {len(constraints)} constraints; return one finite cost"
            " for each, and times above zero"
        )
        raise InputError(text, code=ErrorCode.INVALID_VALUE, field="measure", value=list(costs))
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


@dataclass(frozen=True)
class PlanCosts:
    """What plans cost.

    Attributes:
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
    """How many units each group keeps, the tables of the whole model that show where cost goes, and the budgets."""

    allocation: Allocation
    tables: tuple[CostTable, ...]
    constraints: tuple[Constraint, ...]


def plan_costs(times: KeptTimes, groups: Sequence[PrunableGroup], budgets: Budgets, *, is_timed: bool) -> PlanCosts:
    """What plans cost, counted, and measured where that is needed.

    BudgetError, before the rows are read, if a budget is below the cost of a plan that keeps nothing of the groups.
    """
    counted = times.costs.count_tables()
    require_reachable(groups, budgets.constraints(counted))
    if not is_timed:
        return PlanCosts(times, counted)
    timed = budgets.timed(times.time_tables(macs_of(counted)))
    times.costs.engines.release()
    require_reachable(groups, budgets.constraints(timed))
    return PlanCosts(times, counted, timed)


def prune(
    pruner: Pruner[Any], groups: Sequence[PrunableGroup], costs: PlanCosts, budgets: Budgets, log: RunLog
) -> Pruned:
    """Remove units, and give the model the remaining weights.

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
    costs.times.costs.engines.release()
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
