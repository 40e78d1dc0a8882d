"""A* pruning iteration by iteration (Parnami et al. 2021, table 3 and figures 8 to 10), compared with random pruning.

The search runs on the model folder as it is, over the evaluation rows or as many of them as the size allows. Its
selections are then scored on the test rows, which it never sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset

from benchmarks.studies import figures
from benchmarks.studies.base import Study
from benchmarks.studies.cell_store import Cell, Result
from benchmarks.studies.context import StudyContext, drawn, site_numbers
from benchmarks.studies.findings import Findings, Picture, Table, difference, interval_text
from benchmarks.studies.request import StudyRequest
from compressor.errors import ErrorCode, UsageError, suggestion
from compressor.measure.bootstrap import Interval
from compressor.progress import ProgressCallback
from compressor.results import MetricUnit
from compressor.selection.search import Decision, Head
from compressor.selection.search.astar import AStarOptions, AStarSearch
from compressor.selection.search.base import metric_drop
from compressor.selection.search.random_subsets import RandomOptions, RandomSearch, random_walk
from compressor.selection.subset_evaluator import ModelSubsetEvaluator

VARIANTS = ("paper", "literal", "lazy")
RANDOM = "random"
REMOVED, ELIMINATED, KEPT = "removed", "eliminated", "left: costs the budget or more"

Walk = tuple[int, float]
"""Heads that a random walk removed within a budget, and the metric then; larger is better."""


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


class AStarFindings:
    """The findings of the cells that are finished.

    Random walks end at the largest budget that any request had. Searches of larger budgets have no counterpart and are
    left out.

    Args:
        results: results of the cells.
        context: model and rows.
        searched_rows: number of evaluation rows that the searches used.
    """

    def __init__(self, results: Sequence[Result], context: StudyContext, searched_rows: int) -> None:
        self.context, self.searched_rows = context, searched_rows
        self.task = context.data.task.chooser
        self.points, self.sign = self.task.metric_unit.scale, 1.0 if self.task.higher_is_better else -1.0
        random = max((cell for cell in results if _is_random(cell)), key=lambda cell: cell["settings"]["budget"])
        largest = random["settings"]["budget"]
        searches = [cell for cell in results if not _is_random(cell) and cell["settings"]["budget"] <= largest]
        self.searches = sorted(searches, key=_order)
        self.budgets = sorted({cell["settings"]["budget"] for cell in self.searches})
        self.walks = {budget: _walks_within(random, budget / self.points) for budget in self.budgets}

    def findings(self) -> Findings:
        """Rows, tables, figures, and a summary."""
        notes = (f"budget {cell['settings']['budget']:g}: {note}" for cell in self.searches for note in cell["notes"])
        return Findings(
            [*self._search_rows(), *self._random_rows()],
            [self._selections(), self._test_scores()],
            [*self._iterations(), *self._kept_heads(), *self._costs(), *self._comparisons()],
            [*self._variants_compared(), *dict.fromkeys(notes)],
        )

    def _search_rows(self) -> list[dict[str, Any]]:
        return [
            {**cell["settings"], "iteration": number, **step, "seconds": cell["seconds"]}
            for cell in self.searches
            for number, step in enumerate(cell["steps"])
        ]

    def _random_rows(self) -> list[dict[str, Any]]:
        heads = len(self.context.heads)
        return [
            {
                "variant": RANDOM,
                "budget": budget,
                "iteration": number,
                "heads": heads - removed,
                "metric": self.sign * metric,
            }
            for budget, walks in self.walks.items()
            for number, (removed, metric) in enumerate(walks)
        ]

    def _selections(self) -> Table:
        columns = ("variant", "budget", "used", "free", "eval", "removed", "eval", "searches", "forwards")
        title = (
            f"{self.task.metric_heading}, on the {self.searched_rows:,} evaluation rows searched (seed"
            f" {self.context.recipe.selection.seed}); free: removed at no loss; forwards: of the whole model over them"
        )
        return Table(title, columns, tuple(self._selection(cell) for cell in self.searches))

    def _selection(self, cell: Result) -> tuple[str, ...]:
        heads, steps = len(self.context.heads), cell["steps"]
        last, free = steps[-1], [step for step in steps if self._loss(cell, step) <= 0]
        return (
            cell["settings"]["variant"],
            f"{cell['settings']['budget']:g}",
            f"{max(0.0, self._loss(cell, last)):.2f}",
            _count_and_share(heads - min(step["heads"] for step in free), heads),
            f"{self.points * free[-1]['metric']:.2f}",
            _count_and_share(heads - last["heads"], heads),
            f"{self.points * last['metric']:.2f}",
            f"{sum(step.get('searches', 0) for step in steps):.0f}",
            f"{last['forwards']:.0f}",
        )

    def _loss(self, cell: Result, step: Result) -> float:
        """Loss of the metric at a step against all heads, in points."""
        return self.points * metric_drop(self.sign * cell["steps"][0]["metric"], self.sign * step["metric"])

    def _test_scores(self) -> Table:
        lines = tuple(
            (
                cell["settings"]["variant"],
                f"{cell['settings']['budget']:g}",
                str(self._removed(cell)),
                f"{self.points * cell['steps'][-1]['test']:.2f}",
                interval_text(Interval(*cell["test_difference"]), self.task),
                str(max(removed for removed, _ in self.walks[cell["settings"]["budget"]])),
            )
            for cell in self.searches
        )
        columns = ("variant", "budget", "removed", "test", "minus dense (95%)", "best random")
        title = f"On {len(self.context.data.test):,} unseen test rows, and the most that a random trial removed"
        return Table(title, columns, lines)

    def _removed(self, cell: Result) -> int:
        heads: int = len(self.context.heads) - cell["steps"][-1]["heads"]
        return heads

    def _iterations(self) -> list[Picture]:
        name = self.task.metric_heading
        curves = (
            (name, "metric", self.points),
            (f"{name}, unseen rows", "test", self.points),
            ("budget left, points", "budget_left", self.points),
            ("heads searched", "searches", 1.0),
        )
        pictures = []
        for budget in self.budgets:
            cells = {cell["settings"]["variant"]: cell["steps"] for cell in self._with_budget(budget)}
            panels = [
                (
                    title,
                    {
                        variant: [(number, scale * step.get(key, 0.0)) for number, step in enumerate(steps)]
                        for variant, steps in cells.items()
                    },
                )
                for title, key, scale in curves
            ]
            pictures.append(
                Picture(
                    f"iterations_b{budget:g}",
                    f"A* iteration by iteration, budget {budget:g}",
                    "On the rows searched, on unseen rows, what is left of the budget, and how many heads were tried.",
                    figures.curves(panels, "iteration"),
                    wide=True,
                )
            )
        return pictures

    def _with_budget(self, budget: float) -> list[Result]:
        return [cell for cell in self.searches if cell["settings"]["budget"] == budget]

    def _kept_heads(self) -> list[Picture]:
        pictures = []
        for variant in dict.fromkeys(cell["settings"]["variant"] for cell in self.searches):
            cells = [cell for cell in self.searches if cell["settings"]["variant"] == variant]
            panels = [(f"budget {cell['settings']['budget']:g}", self._kept_map(cell)) for cell in cells]
            description = "Dark: kept, light: removed. Rows are attention layers in call order, columns heads."
            figure = figures.maps(panels, low=0.0, high=1.0)
            name = f"solutions_{variant}"
            pictures.append(Picture(name, f"Heads kept, variant {variant}", description, figure, wide=len(panels) > 1))
        return pictures

    def _kept_map(self, cell: Result) -> np.ndarray:
        kept = {(site, head) for site, head in cell["kept"]}
        return self.context.map({head: float(head in kept) for head in self.context.heads})

    def _costs(self) -> list[Picture]:
        pictures = []
        columns = max(site.heads for site in self.context.sites)
        description = "What each head cost when it was last measured, in points below all heads, in ascending order."
        for cell in self.searches:
            variant, budget = cell["settings"]["variant"], cell["settings"]["budget"]
            costs = [(self.points * cost, state) for _, _, cost, state in cell["costs"]]
            if not costs:
                continue
            figure = figures.sorted_costs(costs, columns, (REMOVED, ELIMINATED, KEPT))
            title = f"Sorted costs, {variant}, budget {budget:g}"
            pictures.append(Picture(f"costs_{variant}_b{budget:g}", title, description, figure, wide=True))
        return pictures

    def _comparisons(self) -> list[Picture]:
        """Two figures per budget: heads removed by random walks and by A*, and the metric of each."""
        pictures = []
        name = self.task.metric_heading
        for budget, walks in self.walks.items():
            best = max(self._with_budget(budget), key=self._removed)
            removed = self._removed(best)
            counts = figures.histogram([count for count, _ in walks], "heads removed", line=removed, whole=True)
            description = f"Heads removed in each of {len(walks)} random trials; the line is A*'s {removed}."
            pictures.append(Picture(f"random_b{budget:g}", f"Random pruning, budget {budget:g}", description, counts))
            groups = {
                "random": [(count, self.sign * self.points * metric) for count, metric in walks],
                "A*": [(removed, self.points * best["steps"][-1]["metric"])],
            }
            figure = figures.scatter(groups, "heads removed", name)
            description = f"The {name.partition(',')[0]} left by each trial, on the rows searched."
            pictures.append(
                Picture(f"random_metric_b{budget:g}", f"Random against A*, budget {budget:g}", description, figure)
            )
        return pictures

    def _variants_compared(self) -> list[str]:
        lines = []
        cells = {(cell["settings"]["variant"], cell["settings"]["budget"]): cell for cell in self.searches}
        for (variant, budget), lazy in cells.items():
            paper = cells.get(("paper", budget))
            if variant != "lazy" or paper is None:
                continue
            selected = "the same heads as" if lazy["kept"] == paper["kept"] else "other heads than"
            share = lazy["steps"][-1]["evaluations"] / paper["steps"][-1]["evaluations"]
            lines.append(f"budget {budget:g}: lazy chose {selected} paper, with {100 * share:.0f}% of its evaluations")
        return lines


def _state(head: Head, last: Decision) -> str:
    return REMOVED if head not in last.kept else ELIMINATED if head in last.eliminated else KEPT


def _is_random(cell: Result) -> bool:
    return bool(cell["settings"]["variant"] == RANDOM)


def _count_and_share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.0f}%)"


def _order(cell: Result) -> tuple[Any, ...]:
    return (cell["settings"]["budget"], VARIANTS.index(cell["settings"]["variant"]))


def _walks_within(random: Result, budget: float) -> list[Walk]:
    """Each random walk up to the last removal whose loss is within the budget."""
    walks = []
    for metrics in random["walks"]:
        beyond = (n for n, metric in enumerate(metrics) if metric_drop(random["dense"], metric) > budget)
        removed = next(beyond, len(metrics))
        walks.append((removed, metrics[removed - 1] if removed else random["dense"]))
    return walks
