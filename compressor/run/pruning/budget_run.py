"""What pruning under a budget reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compressor.config.run import Recipe
from compressor.config.steps import Units
from compressor.run.products import LoadedModel, SelectedPlan
from compressor.run.pruning.cost_tables import CostSource
from compressor.run.run_log import RunLog
from compressor.run.step_store import StepStore
from compressor.tasks import Data
from graph_passes import Refusal


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
        times_plans: whether engines of plans are timed until one meets a budget of time; else the tables decide.
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
    times_plans: bool = True
