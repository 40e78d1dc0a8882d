"""The result of learning: the plan of kept units, and curves from the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressor.config.steps import Heads, Units
from compressor.results import CertifiedLoss, CurvePoint, Note
from compressor.tasks.data import Data
from graph_passes import Plan


@dataclass(frozen=True)
class LearningResult:
    """A plan and how it was learned.

    Attributes:
        plan: every site with the heads that are kept. The caller adds the fingerprint of the model.
        curves: values that were measured during learning, by step.
        trained: whether the weights of the model changed.
        notes: facts for a reader of the plan, e.g. that it is certified.
        certificate: the loss of a search that is certified; None: no certificate was requested.
    """

    plan: Plan
    curves: tuple[CurvePoint, ...]
    trained: bool
    notes: tuple[Note, ...] = ()
    certificate: CertifiedLoss | None = None


def recorded(plan: Plan, selection: Heads | Units, options: Mapping[str, Any], data: Data) -> Plan:
    """The plan with a record of how its units were selected."""
    record = {"method": selection.method, "options": dict(options), "seed": selection.seed, "data": data.train_hash}
    return plan.model_copy(update=record)


def training_curves(log: Sequence[Mapping[str, Any]], metric: str | None) -> tuple[CurvePoint, ...]:
    """The log of `fit` as points; without a metric, the evaluation rows have no labels.

    `overlap` at a point is the share of the heads that are kept there, of those that are kept at the last point.
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
