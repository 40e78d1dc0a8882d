"""What pruning under a budget reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compressor.config.run import Recipe
from compressor.run.learning_store import LearningStore
from compressor.run.products import LoadedModel, SelectedPlan
from compressor.run.pruning.cost_tables import CostSource
from compressor.run.run_log import RunLog
from compressor.tasks import Data
from graph_passes import Refusal


@dataclass(frozen=True)
class BudgetRun:
    """What pruning under a budget reads.

    Attributes:
        recipe: budgets, method and rows.
        model: the model, with its groups.
        data: the rows.
        selected: the plan of heads that another method selected; None: every unit may be removed.
        costs: gives cost tables.
        refused: groups that cannot be removed from the graph.
        quantization_drop: what the whole model loses by the precision of the engine, in the metric's unit.
        store: folder in which finished parts are kept.
        log: receives stages and notes.
    """

    recipe: Recipe
    model: LoadedModel
    data: Data
    selected: SelectedPlan | None
    costs: CostSource
    refused: Sequence[Refusal]
    quantization_drop: float
    store: LearningStore
    log: RunLog
