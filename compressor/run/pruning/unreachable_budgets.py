"""The error for budgets that no plan meets: the least cost that is possible, and what it is made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from compressor.errors import BudgetError, ErrorCode
from compressor.measure.costs import CostTable
from compressor.report.budgets import UNIT_NAMES

_PARTS = {
    "heads": "heads that may not be removed",
    "neurons": "neurons that may not be removed",
    "rest": "everything else (embeddings, norms, the output)",
}
"""Parts of the least cost -> what they are called."""


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
