"""The metric without each single head, and with one head left in a layer (Michel et al. 2019, section 3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.studies import figures
from benchmarks.studies.base import Study
from benchmarks.studies.cell_store import Cell, Result
from benchmarks.studies.findings import Findings, Picture, Table, difference, interval_text
from benchmarks.studies.request import StudyRequest
from compressor.errors import ErrorCode, UsageError
from compressor.measure.bootstrap import Interval
from compressor.progress import ProgressCallback
from compressor.selection.search import Head

CONFIDENCE = 0.99
"""Confidence of the intervals: Michel et al. call a difference significant at p < 0.01."""


class Ablate(Study):
    """One cell per attention layer: each of its heads dropped alone, and all of its heads but one."""

    description = "each head dropped alone, and each layer with a single head"
    axes: ClassVar = {}
    groups = ()
    uses_ray = True

    @classmethod
    def check(cls, request: StudyRequest) -> None:
        if request.recipe.selection.options:
            raise UsageError(
                "--options: study ablate has no method, so it has no options; omit them",
                code=ErrorCode.CONTRADICTION,
                field="options",
            )

    def cells(self) -> list[Cell]:
        return [Cell(f"layer-{index}", {"layer": index}) for index in range(len(self.context.sites))]

    def run(self, cell: Cell, work: Path, on_progress: ProgressCallback) -> Result:
        context = self.context
        context.reset_model()
        site, task = context.sites[cell.settings["layer"]], context.data.task.chooser
        all_heads = frozenset(context.heads)
        layer_heads = [(site.name, head) for head in range(site.heads)]
        on_eval = context.evaluator(context.data.eval, work / "eval.npz")
        on_test = context.evaluator(context.data.test, work / "test.npz")
        on_test.evaluate_without(all_heads, layer_heads)
        on_progress(1, 3)
        dense = on_test.statistics(all_heads)
        alone = []
        for head in layer_heads:
            without = on_test.statistics(all_heads - {head})
            result = difference(task, [dense], [without], CONFIDENCE)
            alone.append({"head": head[1], "test": task.score(without), "difference": result})
        on_progress(2, 3)
        rest = all_heads - set(layer_heads)
        # Larger is better here, whatever the metric; the first of equal heads wins.
        best = layer_heads[int(np.argmax(on_eval.evaluate_all([rest | {head} for head in layer_heads])))]
        metric = on_test.evaluate(rest | {best})
        single = on_test.statistics(rest | {best})
        return {
            "site": site.name,
            "dense": task.score(dense),
            "alone": alone,
            "best": {
                "head": best[1],
                "test": metric if task.higher_is_better else -metric,
                "difference": difference(task, [dense], [single], CONFIDENCE),
            },
        }

    def findings(self, results: Sequence[Result]) -> Findings:
        cells = sorted(results, key=lambda cell: cell["settings"]["layer"])
        dropped = {
            (cell["site"], head["head"]): Interval(*head["difference"]) for cell in cells for head in cell["alone"]
        }
        significant = {head for head, interval in dropped.items() if _is_significant(interval)}
        return Findings(
            [self._row(cell, kind, head) for cell in cells for kind, head in _results_of(cell)],
            [self._single_heads(cells)],
            [self._map(dropped, significant), self._histogram(cells)],
            (
                f"dropping one head changes the {self.context.data.task.chooser.metric} significantly for"
                f" {len(significant)} of {len(dropped)} heads ({100 * CONFIDENCE:g}% interval of a paired bootstrap,"
                " not corrected for their number)",
            ),
        )

    def _row(self, cell: Result, kind: str, head: Mapping[str, Any]) -> dict[str, Any]:
        interval = Interval(*head["difference"])
        return {
            "layer": cell["settings"]["layer"],
            "site": cell["site"],
            "what": kind,
            "head": head["head"],
            "metric": self.context.data.task.chooser.metric,
            "test": head["test"],
            **interval._asdict(),
            "significant": _is_significant(interval),
            "seconds": cell["seconds"],
        }

    def _single_heads(self, cells: Sequence[Result]) -> Table:
        task = self.context.data.task.chooser
        lines = tuple(
            (
                str(cell["settings"]["layer"]),
                str(cell["best"]["head"]),
                f"{task.metric_unit.scale * cell['best']['test']:.2f}",
                interval_text(Interval(*cell["best"]["difference"]), task),
            )
            for cell in cells
        )
        title = f"{task.metric_heading}: one head left in a layer, the best by the evaluation rows, on the test rows"
        return Table(title, ("layer", "best head", "test", f"minus dense ({100 * CONFIDENCE:g}%)"), lines)

    def _map(self, dropped: Mapping[Head, Interval], significant: Collection[Head]) -> Picture:
        task = self.context.data.task.chooser
        points = {head: task.metric_unit.scale * interval.difference for head, interval in dropped.items()}
        marks = self.context.map({head: float(head in significant) for head in dropped}) == 1.0
        return Picture(
            "ablate_one",
            "Dropping one head",
            f"Change of {task.metric_heading} on the test rows, in points; a dot: the {100 * CONFIDENCE:g}% interval"
            " excludes zero. Rows are attention layers in call order, columns heads.",
            figures.maps([("", self.context.map(points))], diverging=True, marks=marks),
        )

    def _histogram(self, cells: Sequence[Result]) -> Picture:
        task = self.context.data.task.chooser
        scores = [task.metric_unit.scale * head["test"] for cell in cells for head in cell["alone"]]
        dense = task.metric_unit.scale * cells[0]["dense"]
        return Picture(
            "ablate_histogram",
            "What is left without one head",
            f"{task.metric_heading} after each head is dropped alone; the line is the model with all of them.",
            figures.histogram(scores, task.metric_heading, line=dense),
        )


def _results_of(cell: Result) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each head dropped alone (`without`), then the best head as the only one of its layer (`only`)."""
    yield from (("without", head) for head in cell["alone"])
    yield "only", cell["best"]


def _is_significant(interval: Interval) -> bool:
    return interval.low > 0 or interval.high < 0
