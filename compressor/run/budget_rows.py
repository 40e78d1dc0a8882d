"""Rows of the report on budgets: what was requested and reached, and where the cost goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compressor.measure.costs import CostTable
from compressor.pruning.allocate import MAX_BUDGET_RATIO, Allocation, Constraint
from compressor.report.formatting import ms
from compressor.results import BudgetRow, CostShare, Note, NoteCode, Speed
from graph_passes import Plan

DRIFT = 1.25
"""Ratio of the dense engine's times within a run from which on its speeds are called unreliable."""


def budget_rows(constraints: Sequence[Constraint], allocation: Allocation) -> tuple[BudgetRow, ...]:
    """What was requested and what was reached, for the report."""
    return tuple(
        BudgetRow(
            **_size_of(constraint.table),
            unit=constraint.table.unit,
            requested=constraint.budget,
            predicted=predicted,
            reached=measured,
            dense=constraint.table.dense,
            met=measured <= MAX_BUDGET_RATIO * constraint.budget,
        )
        for constraint, predicted, measured in zip(constraints, allocation.predicted, allocation.measured, strict=True)
    )


def predicted_rows(tables: Sequence[CostTable], counts: Mapping[str, int]) -> tuple[BudgetRow, ...]:
    """What a plan that the metric bounds costs by its tables; `delivered_rows` gives the times that it reaches.

    Args:
        tables: tables of times.
        counts: name of the group -> number of units that the plan keeps.
    """
    return tuple(
        BudgetRow(
            **_size_of(table),
            unit=table.unit,
            requested=None,
            predicted=table.cost(counts),
            reached=table.cost(counts),
            dense=table.dense,
        )
        for table in tables
    )


def delivered_rows(rows: Sequence[BudgetRow], speeds: Sequence[Speed]) -> tuple[tuple[BudgetRow, ...], list[Note]]:
    """The rows of a budget with the times of the engine that is delivered.

    Args:
        rows: the rows, with the times of the engine that was built while units were allocated.
        speeds: the delivered engine against dense; empty if it was not timed.

    Returns:
        The rows, without those that bound nothing and were not timed; and notes of those that the first engine met and
        the delivered one misses, and of sizes at which the dense engine takes another time than before.
    """
    timed: dict[tuple[int | None, int | None], Speed] = {
        (speed.batch, speed.seq): speed for speed in speeds if speed.void is None
    }
    delivered, notes = [], []
    for row in rows:
        speed = timed.get((row.batch, row.seq)) if row.unit == "ms" else None
        if speed is not None:
            before = row
            reached, low, high = (row.dense / ratio for ratio in (speed.ratio, speed.high, speed.low))
            met = row.requested is None or reached <= MAX_BUDGET_RATIO * row.requested
            row = row.model_copy(update={"reached": reached, "low": low, "high": high, "met": met})
            drift = speed.dense.p50 / row.dense
            if max(drift, 1 / drift) > DRIFT:
                text = (
                    f"{row.label}: the dense engine took {ms(row.dense)} when units were allocated, and takes"
                    f" {ms(speed.dense.p50)} now; other work disturbs this machine, and the speed is unreliable"
                )
                notes.append(Note(code=NoteCode.TIMES_DRIFTED, text=text))
            if row.requested is not None and before.met and not met:
                text = (
                    f"{row.label}: the plan took {ms(before.reached)} when it was chosen, and the delivered engine"
                    f" takes {ms(reached)} of {ms(row.requested)}; repeat the command on an idle machine"
                )
                notes.append(Note(code=NoteCode.BUDGET_MISSED, text=text))
        if row.requested is not None or speed is not None:
            delivered.append(row)
    return tuple(delivered), notes


def cost_shares(tables: Sequence[CostTable], plan: Plan) -> tuple[CostShare, ...]:
    """What attentions, feed-forwards and everything else cost, before and after a plan.

    Args:
        tables: tables of the whole model.
        plan: a plan of all groups of the tables.
    """
    counts = plan.counts
    shares = []
    for table in tables:
        # What groups save together is not exactly the sum, so that the parts are scaled to the costs of whole plans.
        scale = _scale(table, {})
        scale_of_plan, size = _scale(table, counts), _size_of(table)
        for kind, unit_type in (("attention", "heads"), ("feed-forward", "neurons")):
            members = [(row, name) for row in table.rows if row.type == unit_type for name in row.groups]
            if not members:
                continue
            before = scale * sum(row.saving(0) for row, _ in members)
            after = scale_of_plan * sum(row.saving(0) - row.saving(counts[name]) for row, name in members)
            shares.append(CostShare(**size, unit=table.unit, type=kind, before=before, after=after))
        rest = table.least
        shares.append(CostShare(**size, unit=table.unit, type="rest", before=rest, after=rest))
    return tuple(shares)


def _size_of(table: CostTable) -> dict[str, Any]:
    """The fields of a row that name the size of a table."""
    return {"label": table.size_label, "batch": table.batch or None, "seq": table.seq}


def _scale(table: CostTable, counts: Mapping[str, int]) -> float:
    """Ratio of what the units of a plan cost together to the sum of their costs."""
    removable = table.sum_of(counts) - table.least_sum
    return (table.cost(counts) - table.least) / removable if removable > 0 else 1.0
