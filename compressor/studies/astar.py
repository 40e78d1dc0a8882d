"""A* pruning iteration by iteration (Parnami et al. 2021, table 3 and figures 8 to 10), compared with random pruning.

The search runs on the model folder as it is, over the evaluation rows or as many of them as the size allows. Its
selections are then scored on the test rows, which it never sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from datasets import Dataset

from compressor.config.study import StudyRequest
from compressor.errors import ErrorCode, UsageError, suggestion
from compressor.progress import ProgressCallback
from compressor.results import MetricUnit
from compressor.selection.search import AStarOptions, AStarSearch, Head, RandomOptions, RandomSearch, Step
from compressor.selection.search.random_subsets import random_walk
from compressor.selection.subset_evaluator import ModelSubsetEvaluator
from compressor.studies.astar_findings import ELIMINATED, KEPT, RANDOM, REMOVED, VARIANTS, AStarFindings
from compressor.studies.base import Result, Study
from compressor.studies.cell_store import Cell
from compressor.studies.context import drawn, site_numbers
from compressor.studies.results import Findings, difference


class AStar(Study):
    """One cell per variant and budget, and random walks at the largest budget, which contain those of smaller ones."""

    description = "A* pruning per iteration, its costs, and random pruning beside it"
    axes: ClassVar = {"variants": ("paper", "lazy"), "budgets": (1.0, 2.0, 3.0)}
    groups = ()
    uses_ray = True

    @classmethod
    def check(cls, request: StudyRequest) -> None:
        for variant in cls.values(request, "variants"):
            if variant not in VARIANTS:
                raise UsageError(
                    f"--variants {variant}: unknown; {suggestion(variant, VARIANTS)}",
                    code=ErrorCode.UNKNOWN_NAME,
                    field="variants",
                    value=variant,
                )
        if request.recipe.selection.options:
            raise UsageError(
                "--options: study astar has none; use --variants and --budgets",
                code=ErrorCode.CONTRADICTION,
                field="options",
            )

    def cells(self) -> list[Cell]:
        task = self.context.data.task.chooser
        if task.metric_unit is MetricUnit.RAW and "budgets" not in self.request.axes:
            raise UsageError(
                f"study astar: budgets of {task.metric} are in its own unit, not in points; name some (--budgets)",
                code=ErrorCode.MISSING_VALUE,
                field="budgets",
            )
        largest = max(self.axis("budgets"))
        return [
            *(
                Cell(f"{variant}-b{budget:g}", {"variant": variant, "budget": budget})
                for budget in self.axis("budgets")
                for variant in self.axis("variants")
            ),
            Cell(f"{RANDOM}-b{largest:g}", {"variant": RANDOM, "budget": largest}),
        ]

    def run(self, cell: Cell, work: Path, on_progress: ProgressCallback) -> Result:
        self.context.reset_model()
        budget = cell.settings["budget"] / self.context.data.task.chooser.metric_unit.scale
        if cell.settings["variant"] == RANDOM:
            return self._run_random(budget, on_progress)
        return self._run_search(cell.settings["variant"], budget, on_progress)

    def _run_search(self, variant: str, budget: float, on_progress: ProgressCallback) -> Result:
        context, heads = self.context, self.context.heads
        on_searched, on_test = self._evaluator(), context.evaluator(context.data.test, self.folder.scratch("test.npz"))
        steps = []
        for step in AStarSearch(AStarOptions(variant=variant)).choose(on_searched, None, budget):
            steps.append(step)
            on_progress(len(heads) - len(step.kept), len(heads))
        for step in steps:  # in this order each evaluation reruns only the layers that changed
            on_test.evaluate(step.kept)
        last, costs = steps[-1], {head: cost for step in steps for head, cost in step.costs.items()}
        task = context.data.task.chooser
        dense, selected = (on_test.statistics(kept) for kept in (steps[0].kept, last.kept))
        return {
            "steps": [
                {
                    "heads": len(step.kept),
                    "removed": site_numbers(before.kept - step.kept, context),
                    "metric": task.score(on_searched.statistics(step.kept)),
                    "test": task.score(on_test.statistics(step.kept)),
                    **{name: value for name, value in step.values.items() if name != "metric"},
                }
                for before, step in zip((steps[0], *steps), steps, strict=False)
            ],
            "kept": sorted(last.kept),
            "costs": [[*head, cost, _state(head, last)] for head, cost in sorted(costs.items())],
            "test_difference": difference(task, [dense], [selected]),
            "notes": [note.text for note in last.notes],
        }

    def _run_random(self, budget: float, on_progress: ProgressCallback) -> Result:
        evaluator = self._evaluator()
        options = RandomOptions(trials=self.request.size.trials, seed=self.request.recipe.selection.seed)
        orders = RandomSearch(options).orders(self.context.heads)
        walks = []
        for number, order in enumerate(orders):
            walks.append(random_walk(evaluator, order, budget))
            on_progress(number + 1, len(orders))
        # Larger is better in a search, whatever the metric.
        return {"dense": evaluator.evaluate(frozenset(self.context.heads)), "walks": walks}

    def _evaluator(self) -> ModelSubsetEvaluator:
        """The evaluator of all cells: searches of different variants and budgets start with the same evaluations."""
        return self.context.evaluator(self._rows, self.folder.scratch("searched.npz"))

    @cached_property
    def _rows(self) -> Dataset:
        """The evaluation rows that the searches use."""
        return drawn(self.context.data.eval, self.request.size.searched, self.request.recipe.selection.seed)

    def findings(self, results: Sequence[Result]) -> Findings:
        return AStarFindings(results, self.context, len(self._rows)).findings()


def _state(head: Head, last: Step) -> str:
    return REMOVED if head not in last.kept else ELIMINATED if head in last.eliminated else KEPT
