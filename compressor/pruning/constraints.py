"""Constraints on the cost of a plan: the budgets that are set, and the error where no plan meets them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from compressor.errors import BudgetError, ErrorCode, InputError
from compressor.measure.costs import CostTable, GroupCosts
from compressor.report.budgets import UNIT_NAMES
from compressor.units import PrunableGroup

SHARE = "share"
"""Unit of a table of shares of the whole model's time."""
_PARTS = {
    "heads": "heads that may not be removed",
    "neurons": "neurons that may not be removed",
    "rest": "everything else (embeddings, norms, the output)",
}
"""Parts of the least cost -> what they are called."""


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
        """The budgets on the costs of some tables, and on the number of heads.

        Args:
            tables: tables of every unit, at the sizes at which budgets hold.
        """
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
        budgets, tables = zip(*((part.budget, part.table.scaled(part.correction)) for part in constraints), strict=True)
        raise unreachable(budgets, tables, least, {group.name for group in groups})


def unreachable(
    budgets: Sequence[float], tables: Sequence[CostTable], least: Sequence[float], removable: Collection[str]
) -> BudgetError:
    """The error for budgets of which some are below the cost of a plan that keeps nothing.

    Args:
        budgets: the budgets.
        tables: what plans cost, for each budget.
        least: cost of a plan that keeps nothing, for each budget.
        removable: names of the groups whose units may be removed.
    """
    exceeded = [number for number, cost in enumerate(least) if budgets[number] < cost]
    parts = [_parts(table, cost, removable) for table, cost in zip(tables, least, strict=True)]
    first = exceeded[0]
    table, minimum = tables[first], least[first]
    if table.unit == "ms":
        subject = f"at {table.size_label}"
        ratio = f" ({table.dense / minimum:.3g} times as fast as dense)" if minimum > 0 else ""
    else:
        subject, ratio = f"of {UNIT_NAMES[table.unit]}", f" ({minimum / table.dense:.1%} of dense)"
    made_of = ", ".join(
        f"{_amount(parts[first][name], table)} of {text}" for name, text in _PARTS.items() if parts[first][name] > 0
    )
    return BudgetError(
        f"the budget {subject} is {_amount(budgets[first], table)}, but {_amount(minimum, table)} remain{ratio} even"
        f" when every head and neuron that may be removed is removed: {made_of}; allow more",
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
