"""What pruning under a budget reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compressor.config.run import Recipe
from compressor.config.steps import Units
from compressor.progress import RunLog
from compressor.results import Candidate, size_label
from compressor.run.pruning.cost_tables import CostSource
from compressor.run.run_context import LoadedModel, SelectedPlan
from compressor.run.step_store import StepStore
from compressor.targets.base import parse_shape
from compressor.tasks import Data
from graph_passes import Refusal

_UNKNOWN_SHARE = 0.5
"""Share of the units with which engines are timed where the metric decides how many are left."""


@dataclass(frozen=True)
class BudgetRun:
    """What pruning under a budget reads.

    Attributes:
        step: budgets, method and rows.
        recipe: the settings of the run.
        model: the model, with its groups.
        data: the rows.
        selected: the plan of an earlier step; None: there is none.
        costs: gives cost tables.
        refused: groups that cannot be removed from the graph.
        quantization_drop: what the whole model loses by the precision of the engine, in the metric's unit.
        store: folder in which finished parts are kept.
        log: receives stages and notes.
    """

    step: Units
    recipe: Recipe
    model: LoadedModel
    data: Data
    selected: SelectedPlan | None
    costs: CostSource
    refused: Sequence[Refusal]
    quantization_drop: float
    store: StepStore
    log: RunLog


def share_left(step: Units, candidates: Sequence[Candidate]) -> float:
    """About the share of the units that meets a budget: that of the work, or of the time of the fastest candidate.

    Args:
        step: the budgets.
        candidates: the candidates with their times.
    """
    if step.is_unbounded or step.keep is not None:  # as much as the metric allows
        return _UNKNOWN_SHARE
    shares = [share for share in (step.macs, step.parameters) if share is not None]
    holding = [candidate for candidate in candidates if candidate.holds and candidate.speed]
    if holding:
        best = max(holding, key=lambda candidate: candidate.speed or 0.0)
        if step.speedup is not None:
            shares.append((best.speed or 0.0) / step.speedup)
        if step.milliseconds is not None:
            labels = {size_label(*parse_shape(shape)) for shape in step.budget_at}
            times = {label: time for label, time in best.milliseconds.items() if label in labels} or best.milliseconds
            shares.append(step.milliseconds / max(times.values()))
    return min(1.0, *shares)
