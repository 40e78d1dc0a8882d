"""The error for budgets that no plan meets: the least cost that is possible, and what it is made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from compressor.errors import BudgetError, ErrorCode
from compressor.measure.costs import CostTable
from compressor.report.budgets import UNIT_NAMES

if TYPE_CHECKING:
    from compressor.run.pruning.budget import Constraint

_PARTS = {
    "heads": "heads that may not be removed",
    "neurons": "neurons that may not be removed",
    "rest": "everything else (embeddings, norms, the output)",
}
"""Parts of the least cost -> what they are called."""


def unreachable(constraints: Sequence[Constraint], least: Sequence[float], removable: Collection[str]) -> BudgetError:
    """The error for budgets of which some are below the cost of a plan that keeps nothing.

    Args:
        constraints: the constraints.
        least: cost of a plan that keeps nothing, under each constraint.
        removable: names of the groups whose units may be removed.
    """
    budgets = [constraint.budget for constraint in constraints]
    exceeded = [number for number, cost in enumerate(least) if budgets[number] < cost]
    constraint, minimum = constraints[exceeded[0]], least[exceeded[0]]
    parts = [_parts(part, cost, removable) for part, cost in zip(constraints, least, strict=True)]
    table = constraint.table
    if table.unit == "ms":
        subject = f"at {table.size_label}"
        ratio = f" ({table.dense / minimum:.3g} times as fast as dense)" if minimum > 0 else ""
    else:
        subject, ratio = f"of {UNIT_NAMES[table.unit]}", f" ({minimum / table.dense:.1%} of dense)"
    made_of = ", ".join(
        f"{_amount(cost, table)} of {_PARTS[name]}" for name, cost in parts[exceeded[0]].items() if cost > 0
    )
    return BudgetError(
        f"the budget {subject} is {_amount(constraint.budget, table)}, but {_amount(minimum, table)} remain{ratio} if"
        f" every head and neuron is removed that may be: {made_of}; allow more",
        code=ErrorCode.BUDGET_UNREACHABLE,
        budgets=tuple(budgets),
        least=tuple(least),
        parts=tuple(parts),
        exceeded=tuple(exceeded),
    )


def _parts(constraint: Constraint, least: float, removable: Collection[str]) -> dict[str, float]:
    """What the cost of a plan that keeps nothing of the removable groups is made of; the parts add up to it."""
    kept = {
        kind: constraint.correction
        * sum(
            row.saving(0)
            for row in constraint.table.rows
            for name in row.groups
            if row.type == kind and name not in removable
        )
        for kind in ("heads", "neurons")
    }
    return {**kept, "rest": least - sum(kept.values())}


def _amount(value: float, table: CostTable) -> str:
    return f"{value:.4g} ms" if table.unit == "ms" else f"{value:,.0f}"
