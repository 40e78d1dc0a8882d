"""The budgets of a run and its costs by type of layer, as rows of text for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.report import formatting
from compressor.results import WHOLE_MODEL, BudgetRow, CostShare, CostUnit

UNIT_NAMES: dict[CostUnit, str] = {
    "ms": "time",
    "macs": "multiply-accumulates",
    "parameters": "parameters",
    "heads": "heads",
    "cache": "cache bytes a token",
}
"""The quantity that each unit of cost counts."""


def budget_table(budget: Sequence[BudgetRow]) -> list[tuple[str, ...]]:
    """A row for each budget: the bounded quantity, dense, requested, predicted, reached, share of dense, and outcome.

    Where the metric bounds the plan, the cells of the request and of the outcome are empty.
    """
    return [
        (
            _subject(row),
            *("" if value is None else cost(value, row.unit) for value in (row.dense, row.requested, row.predicted)),
            _reached(row),
            _share(row.reached, row.dense),
            _outcome(row),
        )
        for row in budget
    ]


def budget_lines(budget: Sequence[BudgetRow]) -> list[str]:
    """A line for each budget: the requested, predicted and reached cost."""
    lines = []
    for row in budget:
        line = f"{cost(row.predicted, row.unit)} predicted, {_reached(row)} reached"
        if row.requested is not None:
            whole = "" if row.unit == "ms" else f" of {cost(row.dense, row.unit)}"
            line = f"{cost(row.requested, row.unit)}{whole} requested, {line}: {_outcome(row)}"
        lines.append(f"budget, {_subject(row)}: {line}")
    return lines


def cost_tables(costs: Sequence[CostShare]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """A title for each size and unit, and a row for each type of layer and for their sum.

    A row has the type, the cost before, its share of the whole, the cost after, its share of the plan, and the change.
    """
    tables = []
    for label, unit, members in _by_size(costs):
        before, after = sum(row.before for row in members), sum(row.after for row in members)
        rows: list[tuple[str, ...]] = []
        for name, first, second in (*((row.type, row.before, row.after) for row in members), ("sum", before, after)):
            cells = (cost(first, unit), _share(first, before), cost(second, unit), _share(second, after))
            rows.append((name, *cells, formatting.change(first, second)))
        tables.append((f"{UNIT_NAMES[unit].capitalize()}, {label}", rows))
    return tables


def cost_lines(costs: Sequence[CostShare]) -> list[str]:
    """A line for each size and unit: the cost of each type of layer, before and after."""
    lines = []
    for label, unit, members in _by_size(costs):
        after = {row.type: "" if row.type == "rest" else f" → {cost(row.after, unit)}" for row in members}
        changes = ", ".join(f"{row.type} {cost(row.before, unit)}{after[row.type]}" for row in members)
        lines.append(f"{UNIT_NAMES[unit]}, {label}: {changes}")
    return lines


def cost(value: float, unit: CostUnit) -> str:
    """A cost in its unit: `4.83 ms`, `12.1G`."""
    return formatting.ms(value) if unit == "ms" else formatting.count(round(value))


def quantity(value: float, unit: CostUnit) -> str:
    """A cost with the name of its quantity: `4.83 ms`, `154M multiply-accumulates`."""
    return cost(value, unit) if unit == "ms" else f"{cost(value, unit)} {UNIT_NAMES[unit]}"


def _by_size(costs: Sequence[CostShare]) -> list[tuple[str, CostUnit, list[CostShare]]]:
    keys = dict.fromkeys((row.label, row.unit) for row in costs)
    return [(*key, [row for row in costs if (row.label, row.unit) == key]) for key in keys]


def _subject(row: BudgetRow) -> str:
    """`time, batch 1, length 128`, or `parameters` for a count of the whole model."""
    return UNIT_NAMES[row.unit] if row.label == WHOLE_MODEL else f"{UNIT_NAMES[row.unit]}, {row.label}"


def _outcome(row: BudgetRow) -> str:
    """`met` or `missed`, with `by the median` if the interval of the time includes the budget; empty without one."""
    if row.requested is None:
        return ""
    uncertain = row.low is not None and row.high is not None and row.low <= row.requested < row.high
    return f"{'met' if row.met else 'missed'}{' by the median' if uncertain else ''}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _reached(row: BudgetRow) -> str:
    """The cost that was reached, with its interval if it was timed."""
    text = cost(row.reached, row.unit)
    if row.low is None or row.high is None:
        return text
    return f"{text} (95% interval {cost(row.low, row.unit)} to {cost(row.high, row.unit)})"
