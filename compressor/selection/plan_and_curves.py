"""What came out of learning: heads as a plan, the log as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compressor.results import CurvePoint
from compressor.config.sections import SelectionConfig

from compressor.selection.search import Head, Step
from compressor.tasks.base import Data, Task
from compressor.units import Site, keep_only
from graph_passes import Plan


def all_heads(sites: Sequence[Site]) -> tuple[Head, ...]:
    """Every head in (site, head) order."""
    return tuple((site.name, head) for site in sites for head in range(site.heads))


def to_plan(
    sites: Sequence[Site], kept: Mapping[Head, float], recipe: SelectionConfig, options: Mapping[str, Any], data: Data
) -> Plan:
    """The plan that keeps the heads `kept`, each at its scale."""
    made = {"method": recipe.method, "options": dict(options), "seed": recipe.seed, "data": data.train_hash}
    return keep_only(sites, kept).model_copy(update=made)


def joint_curves(log: Sequence[Mapping[str, Any]], metric: str) -> tuple[CurvePoint, ...]:
    """The trainer's log as points; `overlap` is the share of the heads kept at the end that were already kept then."""
    shown = ("loss", "learning_rate", f"eval_{metric}")
    final = set(next((entry["kept"] for entry in reversed(log) if "kept" in entry), ()))
    points: dict[int, dict[str, float]] = {}
    for entry in log:
        values = {name: float(entry[name]) for name in shown if name in entry}
        if "kept" in entry:
            values.update(entry["gate"])
            values["overlap"] = len(final & set(entry["kept"])) / len(final) if final else 1.0
        if values:
            points.setdefault(int(entry["step"]), {}).update(values)
    return tuple(CurvePoint(step=step, values=values) for step, values in sorted(points.items()))


def search_curves(steps: Sequence[Step], task: Task) -> tuple[CurvePoint, ...]:
    """A search's steps as points: how many heads were left, and the metric in its own direction."""
    points = []
    for number, step in enumerate(steps):
        values = {name: value for name, value in step.values.items() if name != "metric"}
        if "metric" in step.values:
            values[f"eval_{task.metric}"] = step.values["metric"] * (1.0 if task.higher_is_better else -1.0)
        points.append(CurvePoint(step=number, values={**values, "heads": float(len(step.kept))}))
    return tuple(points)
