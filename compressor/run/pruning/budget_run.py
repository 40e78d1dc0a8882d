"""What pruning under a budget reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.config.run import Recipe
from compressor.config.steps import Units
from compressor.run.products import LoadedModel, SelectedPlan
from compressor.run.pruning.cost_tables import CostSource
from compressor.run.run_log import RunLog
from compressor.store import Store
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
        store: keeps what is measured until the plan is known.
        statistics: folder of statistics and losses, which hold for other budgets too.
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
    store: Store
    statistics: Path
    log: RunLog
