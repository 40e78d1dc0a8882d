"""A* pruning seen from inside (Parnami et al. 2021, table 3 and figures 8 to 10), against random pruning.

The search is made on the model folder as it is, over the evaluation rows or as many of them as the size allows; the
test rows, which it never sees, say what its choices are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset

from compressor.config.study import StudyRequest
from compressor.errors import ErrorCode, UsageError, nearest
from compressor.measure.bootstrap import Interval
from compressor.progress import ProgressCallback
from compressor.results import MetricUnit
from compressor.selection.search import AStarOptions, AStarSearch, Head, RandomOptions, RandomSearch, Step
from compressor.selection.search.base import metric_drop
from compressor.selection.search.random_subsets import random_walk
from compressor.selection.subset_evaluator import ModelSubsetEvaluator
from compressor.studies import figures
from compressor.studies.base import Result, Study
from compressor.studies.cell_store import Cell
from compressor.studies.context import drawn, site_numbers
from compressor.studies.results import Findings, Picture, Table, difference, tell

VARIANTS = ("paper", "literal", "lazy")
RANDOM = "random"
_REMOVED, _ELIMINATED, _LEFT = "removed", "eliminated", "left: costs the budget or more"


class AStar(Study):
    """Each variant at each budget, and random ways down at the largest, which hold those of the smaller ones."""

    says = "A* pruning per iteration, its costs, and random pruning beside it"
    axes: ClassVar = {"variants": ("paper", "lazy"), "budgets": (1.0, 2.0, 3.0)}
    groups = ()
    spreads = True

    @classmethod
    def check(cls, request: StudyRequest) -> None:
        for variant in cls.values(request, "variants"):
            if variant not in VARIANTS:
                raise UsageError(
                    f"--variants {variant}: unknown; {nearest(variant, VARIANTS)}",
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

    def run(self, cell: Cell, work: Path, tell: ProgressCallback) -> Result:
        self.context.fresh()
        budget = cell.settings["budget"] / self._points
        ask = self._random if cell.settings["variant"] == RANDOM else self._search
        return ask(cell, budget, tell)

    def _search(self, cell: Cell, budget: float, tell: ProgressCallback) -> Result:
        context, heads = self.context, self.context.heads
        seen, unseen = self._searched(), context.trials(context.data.test, self.folder.scratch("test.npz"))
        steps = []
        for step in AStarSearch(AStarOptions(variant=cell.settings["variant"])).choose(seen, None, budget):
            steps.append(step)
            tell(len(heads) - len(step.kept), len(heads))
        for step in steps:  # one by one: each runs only what it drops
            unseen.evaluate(step.kept)
        last, costs = steps[-1], {head: cost for step in steps for head, cost in step.costs.items()}
        task = context.data.task.chooser
        dense, chosen = (unseen.statistics(kept) for kept in (steps[0].kept, last.kept))
        return {
            "steps": [
                {
                    "heads": len(step.kept),
                    "removed": site_numbers(before.kept - step.kept, context),
                    "metric": task.score(seen.statistics(step.kept)),
                    "test": task.score(unseen.statistics(step.kept)),
                    **{name: value for name, value in step.values.items() if name != "metric"},
                }
                for before, step in zip((steps[0], *steps), steps, strict=False)
            ],
            "kept": sorted(last.kept),
            "costs": [[*head, cost, _state(head, last)] for head, cost in sorted(costs.items())],
            "test_difference": difference(task, [dense], [chosen]),
            "notes": [note.text for note in last.notes],
        }

    def _random(self, cell: Cell, budget: float, tell: ProgressCallback) -> Result:
        trials = self._searched()
        options = RandomOptions(trials=self.request.size.trials, seed=self.request.recipe.selection.seed)
        orders = RandomSearch(options).orders(self.context.heads)
        walks = []
        for number, order in enumerate(orders):
            walks.append(random_walk(trials, order, budget))
            tell(number + 1, len(orders))
        # Larger is better in a search, whatever the metric.
        return {"dense": trials.evaluate(frozenset(self.context.heads)), "walks": walks}

    def _searched(self) -> ModelSubsetEvaluator:
        """Searches of other variants and budgets begin alike: what they share is measured once for all cells."""
        return self.context.trials(self._rows, self.folder.scratch("searched.npz"))

    @cached_property
    def _rows(self) -> Dataset:
        """Those that are searched."""
        return drawn(self.context.data.eval, self.request.size.searched, self.request.recipe.selection.seed)

    @property
    def _points(self) -> float:
        return self.context.data.task.chooser.metric_unit.scale

    def findings(self, results: Sequence[Result]) -> Findings:
        random = max(
            (cell for cell in results if cell["asked"]["variant"] == RANDOM), key=lambda cell: cell["asked"]["budget"]
        )
        # Random walks end at their budget: a search of a larger one, left by an earlier call, has nothing beside it.
        most = random["asked"]["budget"]
        considered = [
            cell for cell in results if cell["asked"]["variant"] != RANDOM and cell["asked"]["budget"] <= most
        ]
        searched = sorted(considered, key=_order)
        budgets = sorted({cell["asked"]["budget"] for cell in searched})
        random_trials = {budget: _within(random, budget / self._points) for budget in budgets}
        return Findings(
            [*_rows(searched), *self._random_rows(random_trials)],
            [self._table(searched), self._unseen(searched, random_trials)],
            [
                *self._iterations(searched),
                *self._solutions(searched),
                *self._costs(searched),
                *self._trials(random_trials, searched),
            ],
            [
                *self._same(searched),
                *dict.fromkeys(
                    f"budget {cell['asked']['budget']:g}: {note}" for cell in searched for note in cell["notes"]
                ),
            ],
        )

    def _lost(self, cell: Result, step: Result) -> float:
        """How far the metric of a step is worse than that of all heads, in its unit."""
        sign = 1.0 if self.context.data.task.chooser.higher_is_better else -1.0
        return metric_drop(sign * cell["steps"][0]["metric"], sign * step["metric"])

    def _random_rows(self, random_trials: dict[float, list[tuple[int, float]]]) -> list[dict[str, Any]]:
        heads = len(self.context.heads)
        sign = 1.0 if self.context.data.task.chooser.higher_is_better else -1.0
        return [
            {"variant": RANDOM, "budget": budget, "iteration": number, "heads": heads - gone, "metric": sign * metric}
            for budget, trials in random_trials.items()
            for number, (gone, metric) in enumerate(trials)
        ]

    def _table(self, searched: Sequence[Result]) -> Table:
        lines = []
        for cell in searched:
            heads, steps, by = len(self.context.heads), cell["steps"], self._points
            free = [step for step in steps if by * self._lost(cell, step) <= 0]
            used = max(0.0, by * self._lost(cell, steps[-1]))
            searches = sum(step.get("searches", 0) for step in steps)
            lines.append(
                (
                    cell["asked"]["variant"],
                    f"{cell['asked']['budget']:g}",
                    f"{used:.2f}",
                    _share(heads - min(step["heads"] for step in free), heads),
                    f"{by * free[-1]['metric']:.2f}",
                    _share(heads - steps[-1]["heads"], heads),
                    f"{by * steps[-1]['metric']:.2f}",
                    f"{searches:.0f}",
                    f"{steps[-1]['forwards']:.0f}",
                )
            )
        columns = ("variant", "budget", "used", "free", "eval", "removed", "eval", "searches", "forwards")
        name = self.context.data.task.chooser.metric_heading
        title = (
            f"{name}, on the {len(self._rows):,} evaluation rows searched (seed {self.request.recipe.selection.seed});"
            " free: removed at no loss; forwards: of the whole model over them"
        )
        return Table(title, columns, tuple(lines))

    def _unseen(self, searched: Sequence[Result], random_trials: dict[float, list[tuple[int, float]]]) -> Table:
        lines = []
        for cell in searched:
            removed, best = len(self.context.heads) - cell["steps"][-1]["heads"], random_trials[cell["asked"]["budget"]]
            metric = self.context.data.task.chooser.metric
            lines.append(
                (
                    cell["asked"]["variant"],
                    f"{cell['asked']['budget']:g}",
                    str(removed),
                    f"{self._points * cell['steps'][-1]['test']:.2f}",
                    tell(_interval(cell["test_difference"]), metric),
                    str(max(gone for gone, _ in best)),
                )
            )
        columns = ("variant", "budget", "removed", "test", "minus dense (95%)", "best random")
        title = f"On {len(self.context.data.test):,} unseen test rows, and the most that a random trial removed"
        return Table(title, columns, tuple(lines))

    def _iterations(self, searched: Sequence[Result]) -> list[Picture]:
        pictures = []
        name = self.context.data.task.chooser.metric_heading
        for budget in sorted({cell["asked"]["budget"] for cell in searched}):
            cells = {cell["asked"]["variant"]: cell for cell in searched if cell["asked"]["budget"] == budget}
            steps = {variant: list(enumerate(cell["steps"])) for variant, cell in cells.items()}
            panels = [
                (name, {v: [(n, self._points * s["metric"]) for n, s in line] for v, line in steps.items()}),
                (
                    f"{name}, unseen rows",
                    {v: [(n, self._points * s["test"]) for n, s in line] for v, line in steps.items()},
                ),
                (
                    "budget left, points",
                    {v: [(n, self._points * s.get("budget_left", 0.0)) for n, s in line] for v, line in steps.items()},
                ),
                ("heads searched", {v: [(n, s.get("searches", 0.0)) for n, s in line] for v, line in steps.items()}),
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

    def _solutions(self, searched: Sequence[Result]) -> list[Picture]:
        pictures = []
        for variant in dict.fromkeys(cell["asked"]["variant"] for cell in searched):
            cells = [cell for cell in searched if cell["asked"]["variant"] == variant]
            panels = [(f"budget {cell['asked']['budget']:g}", self._kept(cell)) for cell in cells]
            description = "Dark: kept, light: removed. Rows are attention layers in call order, columns heads."
            figure = figures.maps(panels, low=0.0, high=1.0)
            name = f"solutions_{variant}"
            pictures.append(Picture(name, f"Heads kept, variant {variant}", description, figure, wide=len(panels) > 1))
        return pictures

    def _kept(self, cell: Result) -> np.ndarray:
        kept = {(site, head) for site, head in cell["kept"]}
        return self.context.map({head: float(head in kept) for head in self.context.heads})

    def _costs(self, searched: Sequence[Result]) -> list[Picture]:
        pictures = []
        for cell in searched:
            variant, budget = cell["asked"]["variant"], cell["asked"]["budget"]
            costs = [(self._points * cost, state) for _, _, cost, state in cell["costs"]]
            if not costs:
                continue
            columns = max(site.heads for site in self.context.sites)
            description = (
                "What each head cost when it was last measured, in points below all heads, in ascending order."
            )
            figure = figures.sorted_costs(costs, columns, (_REMOVED, _ELIMINATED, _LEFT))
            title = f"Sorted costs, {variant}, budget {budget:g}"
            pictures.append(Picture(f"costs_{variant}_b{budget:g}", title, description, figure, wide=True))
        return pictures

    def _trials(self, random_trials: dict[float, list[tuple[int, float]]], searched: Sequence[Result]) -> list[Picture]:
        pictures = []
        for budget, trials in random_trials.items():
            best = max(
                (cell for cell in searched if cell["asked"]["budget"] == budget),
                key=lambda cell: -cell["steps"][-1]["heads"],
            )
            removed = len(self.context.heads) - best["steps"][-1]["heads"]
            pictures.append(
                Picture(
                    f"random_b{budget:g}",
                    f"Random pruning, budget {budget:g}",
                    f"Heads removed in each of {len(trials)} random trials; the line is A*'s {removed}.",
                    figures.histogram([gone for gone, _ in trials], "heads removed", line=removed, whole=True),
                )
            )
            sign = 1.0 if self.context.data.task.chooser.higher_is_better else -1.0
            groups = {
                "random": [(gone, sign * self._points * metric) for gone, metric in trials],
                "A*": [(removed, self._points * best["steps"][-1]["metric"])],
            }
            name = self.context.data.task.chooser.metric_heading
            figure = figures.scatter(groups, "heads removed", name)
            description = f"The {name.partition(',')[0]} left by each trial, on the rows searched."
            pictures.append(
                Picture(f"random_metric_b{budget:g}", f"Random against A*, budget {budget:g}", description, figure)
            )
        return pictures

    def _same(self, searched: Sequence[Result]) -> list[str]:
        description = []
        panels = {(cell["asked"]["variant"], cell["asked"]["budget"]): cell for cell in searched}
        for (variant, budget), lazy in panels.items():
            paper = panels.get(("paper", budget))
            if variant != "lazy" or paper is None:
                continue
            chosen = "the same heads as" if lazy["kept"] == paper["kept"] else "other heads than"
            share = lazy["steps"][-1]["evaluations"] / paper["steps"][-1]["evaluations"]
            description.append(
                f"budget {budget:g}: lazy chose {chosen} paper, with {100 * share:.0f}% of its evaluations"
            )
        return description


def _state(head: Head, last: Step) -> str:
    return _REMOVED if head not in last.kept else _ELIMINATED if head in last.eliminated else _LEFT


def _interval(panels: Sequence[float]) -> Interval:
    return Interval(*panels)


def _share(count: int, of: int) -> str:
    return f"{count} ({100 * count / of:.0f}%)"


def _order(cell: Result) -> tuple[Any, ...]:
    return (cell["asked"]["budget"], VARIANTS.index(cell["asked"]["variant"]))


def _rows(searched: Sequence[Result]) -> list[dict[str, Any]]:
    return [
        {**cell["asked"], "iteration": number, **step, "seconds": cell["seconds"]}
        for cell in searched
        for number, step in enumerate(cell["steps"])
    ]


def _within(random: Result, budget: float) -> list[tuple[int, float]]:
    """(heads removed, metric then) of each random walk, had it had this budget."""
    panels = []
    for metrics in random["walks"]:
        beyond = (n for n, metric in enumerate(metrics) if metric_drop(random["dense"], metric) > budget)
        gone = next(beyond, len(metrics))
        panels.append((gone, metrics[gone - 1] if gone else random["dense"]))
    return panels
