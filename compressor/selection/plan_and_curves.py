"""The result of learning: the plan of kept units with all that a report says of it, and curves from the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.config.steps import Heads, Units
from compressor.results import BudgetRow, CertifiedLoss, CostShare, CurvePoint, Note
from compressor.tasks.data import Data
from graph_passes import Plan


@dataclass(frozen=True)
class SelectedPlan:
    """A plan and where it came from.

    Attributes:
        plan: one entry for each site, signed with the fingerprint of the weights that it belongs to.
        curves: quantities logged while it was learned.
        trained: whether the model's weights were trained with it.
        notes: notes for the readers of the report.
        budget: the budgets that it meets; empty without budgets.
        costs: the cost of each part of the model, before and after; empty without a budget.
        certificate: the loss that is certified; None where no certificate was requested.
        engine: label of the engine that units were removed for; empty without a budget.
        weights: folder of the weights that the plan belongs to; None: the model has them.
    """

    plan: Plan
    curves: tuple[CurvePoint, ...] = ()
    trained: bool = False
    notes: tuple[Note, ...] = ()
    budget: tuple[BudgetRow, ...] = ()
    costs: tuple[CostShare, ...] = ()
    certificate: CertifiedLoss | None = None
    engine: str = ""
    weights: Path | None = None


def recorded(plan: Plan, selection: Heads | Units, options: Mapping[str, Any], data: Data) -> Plan:
    """The plan with a record of how its units were selected."""
    record = {"method": selection.method, "options": dict(options), "seed": selection.seed, "data": data.train_hash}
    return plan.model_copy(update=record)


def training_curves(log: Sequence[Mapping[str, Any]], metric: str | None) -> tuple[CurvePoint, ...]:
    """The log of `fit` as points; without a metric, the evaluation rows have no labels.

    `overlap` at a point is the share of the heads kept at the last point that are kept there too.
    """
    names = ("loss", "learning_rate", *(() if metric is None else (f"eval_{metric}",)), "eval_divergence")
    final = set(next((entry["kept"] for entry in reversed(log) if "kept" in entry), ()))
    points: dict[int, dict[str, float]] = {}
    for entry in log:
        values = {name: float(entry[name]) for name in names if name in entry}
        if "kept" in entry:
            values.update(entry["gate"])
            values["overlap"] = len(final & set(entry["kept"])) / len(final) if final else 1.0
        if values:
            points.setdefault(int(entry["step"]), {}).update(values)
    return tuple(CurvePoint(step=step, values=values) for step, values in sorted(points.items()))


def joined_curves(earlier: Sequence[CurvePoint], later: Iterable[CurvePoint]) -> tuple[CurvePoint, ...]:
    """The curves of two trainings, the second after the end of the first."""
    last = max((point.step for point in earlier), default=0)
    return (*earlier, *(point.model_copy(update={"step": last + point.step}) for point in later))
