"""Heads that hard concrete gates leave open, by the penalty (Voita et al. 2019; Li et al. 2021, figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.studies import figures
from benchmarks.studies.base import Study, check_options
from benchmarks.studies.cell_store import Cell, Result
from benchmarks.studies.findings import Findings, Picture, Table
from benchmarks.studies.request import StudyRequest
from compressor.progress import ProgressCallback

_METHOD = "hard-concrete"
_RESERVED = {
    "penalty": "study penalty varies it; set its values with --penalties",
    "cooldown": "study penalty never freezes the gates, to see how many stay open; omit it",
}


class Penalty(Study):
    """Hard concrete gates that are never frozen; the number of heads is enforced after the run."""

    description = "weight of the penalty against heads left open by hard concrete gates"
    axes: ClassVar = {"penalties": (0.0005, 0.0015, 0.005, 0.015, 0.05, 0.15), "keeps": ("50%",), "seeds": ()}

    @classmethod
    def check(cls, request: StudyRequest) -> None:
        check_options(request.recipe.selection.options, [_METHOD], _RESERVED)

    def cells(self) -> list[Cell]:
        return [
            Cell(f"p{penalty:g}-k{keep}-s{seed}", {"penalty": penalty, "keep": keep, "seed": seed})
            for seed in self.axis("seeds")
            for keep in self.keeps()
            for penalty in self.axis("penalties")
        ]

    def run(self, cell: Cell, work: Path, on_progress: ProgressCallback) -> Result:
        context, data = self.context, self.context.data
        context.reset_model()
        # Never frozen: the open gates are counted after training, as in the paper.
        free = {"penalty": cell.settings["penalty"], "cooldown": 1.0}
        keep, seed = cell.settings["keep"], cell.settings["seed"]
        selected = context.select_heads(_METHOD, keep, seed, work, on_progress, **free)
        last = next(point.values for point in reversed(selected.curves) if "open" in point.values)
        return {
            "open": last["open"],
            "expected": last["expected"],
            "eval": data.task.score(context.answers(selected.plan, data.eval)),
            "test": data.task.score(context.answers(selected.plan, data.test)),
        }

    def findings(self, results: Sequence[Result]) -> Findings:
        cells = sorted(results, key=lambda cell: tuple(cell["settings"][name] for name in ("keep", "penalty", "seed")))
        task = self.context.data.task
        heading, by = task.metric_heading, task.metric_unit.scale
        rows = [{**cell["settings"], **_numbers(cell), "seconds": cell["seconds"]} for cell in cells]
        groups: dict[tuple[int, float], list[Result]] = {}
        for cell in cells:
            groups.setdefault((cell["settings"]["keep"], cell["settings"]["penalty"]), []).append(cell)
        lines = tuple(
            (
                f"{penalty:g}",
                ", ".join(f"{cell['open']:.0f}" for cell in same),
                f"{np.mean([cell['expected'] for cell in same]):.1f}",
                str(keep),
                f"{by * float(np.mean([cell['test'] for cell in same])):.2f}",
            )
            for (keep, penalty), same in groups.items()
        )
        left: dict[str, list[tuple[float, list[float]]]] = {}
        for (keep, penalty), same in groups.items():
            left.setdefault(f"{keep} kept", []).append((penalty, [cell["open"] for cell in same]))
        first = dict([next(iter(left.items()))])  # how many are open does not depend on how many are kept
        return Findings(
            rows,
            [
                Table(
                    f"Open gates of {len(self.context.heads)} after learning (each seed), and {heading} with"
                    " the heads kept",
                    ("penalty", "open", "expected", "kept", "test"),
                    lines,
                )
            ],
            [
                Picture(
                    "penalty",
                    "Penalty against heads left open",
                    "Mean over seeds; the band reaches from the fewest to the most.",
                    figures.lines_with_ranges(first, "weight of the penalty", "heads open", log=True),
                    wide=True,
                )
            ],
        )


def _numbers(cell: Result) -> dict[str, float]:
    return {name: cell[name] for name in ("open", "expected", "eval", "test")}
