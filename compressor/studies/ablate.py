"""What each head is worth alone, and each layer with one head left (Michel et al. 2019, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from compressor.config.study import StudyRequest
from compressor.errors import ErrorCode, UsageError
from compressor.measure.bootstrap import Interval
from compressor.progress import ProgressCallback
from compressor.studies import figures
from compressor.studies.base import Result, Study
from compressor.studies.cell_store import Cell
from compressor.studies.results import Findings, Picture, Table, difference, tell

CONFIDENCE = 0.99
"""Of the intervals: Michel et al. call a difference significant at p < 0.01."""


class Ablate(Study):
    """A cell an attention layer: each of its heads dropped alone, and all of them but one."""

    says = "each head dropped alone, and each layer with a single head"
    axes: ClassVar = {}
    groups = ()
    spreads = True

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

    def run(self, cell: Cell, work: Path, tell: ProgressCallback) -> Result:
        context = self.context
        context.fresh()
        site, task = context.sites[cell.settings["layer"]], context.data.task.chooser
        everything = frozenset(context.heads)
        mine = [(site.name, head) for head in range(site.heads)]
        chosen_on = context.trials(context.data.eval, work / "eval.npz")
        reported = context.trials(context.data.test, work / "test.npz")
        reported.evaluate_without(everything, mine)
        tell(1, 3)
        dense = reported.statistics(everything)
        alone = []
        for head in mine:
            without = reported.statistics(everything - {head})
            result = difference(task, [dense], [without], CONFIDENCE)
            alone.append({"head": head[1], "test": task.score(without), "difference": result})
        tell(2, 3)
        rest = everything - set(mine)
        # Larger is better here, whatever the metric; of equal heads the first.
        best = mine[int(np.argmax(chosen_on.evaluate_all([rest | {head} for head in mine])))]
        metric = reported.evaluate(rest | {best})
        single = reported.statistics(rest | {best})
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
        cells = sorted(results, key=lambda cell: cell["asked"]["layer"])
        task = self.context.data.task.chooser
        metric, heading, by = task.metric, task.metric_heading, task.metric_unit.scale
        dropped = {
            (cell["site"], single["head"]): Interval(*single["difference"])
            for cell in cells
            for single in cell["alone"]
        }
        scores = [by * single["test"] for cell in cells for single in cell["alone"]]
        sure = {head: result for head, result in dropped.items() if result.low > 0 or result.high < 0}
        rows = []
        for cell in cells:
            for kind, result in (*(("without", single) for single in cell["alone"]), ("only", cell["best"])):
                far = Interval(*result["difference"])
                rows.append(
                    {
                        "layer": cell["asked"]["layer"],
                        "site": cell["site"],
                        "what": kind,
                        "head": result["head"],
                        "metric": metric,
                        "test": result["test"],
                        **far._asdict(),
                        "significant": far.low > 0 or far.high < 0,
                        "seconds": cell["seconds"],
                    }
                )
        lines = tuple(
            (
                str(cell["asked"]["layer"]),
                str(cell["best"]["head"]),
                f"{by * cell['best']['test']:.2f}",
                tell(Interval(*cell["best"]["difference"]), metric),
            )
            for cell in cells
        )
        level = 100 * CONFIDENCE
        title = f"{heading}: one head left in a layer, the best by the evaluation rows, on the test rows"
        changes = self.context.map({head: by * result.difference for head, result in dropped.items()})
        certain = self.context.map({head: float(head in sure) for head in dropped}) == 1.0
        return Findings(
            rows,
            [Table(title, ("layer", "best head", "test", f"minus dense ({level:g}%)"), lines)],
            [
                Picture(
                    "ablate_one",
                    "Dropping one head",
                    f"Change of {heading} on the test rows, in points; a dot: the {level:g}% interval excludes"
                    " zero. Rows are attention layers in call order, columns heads.",
                    figures.maps([("", changes)], diverging=True, marks=certain),
                ),
                Picture(
                    "ablate_histogram",
                    "What is left without one head",
                    f"{heading} after each head is dropped alone; the line is the model with all of them.",
                    figures.histogram(scores, heading, line=by * cells[0]["dense"]),
                ),
            ],
            (
                f"dropping one head changes the {metric} significantly for {len(sure)} of {len(dropped)} heads"
                f" ({level:g}% interval of a paired bootstrap, not corrected for their number)",
            ),
        )
