"""Convergence of joint subset pruning with an annealed and a constant temperature (Li et al. 2021, figure 7)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.studies import figures
from benchmarks.studies.base import Study, check_options
from benchmarks.studies.cell_store import Cell, Result
from benchmarks.studies.context import kept_heads
from benchmarks.studies.findings import Findings, Picture, Table
from benchmarks.studies.request import StudyRequest
from compressor.progress import ProgressCallback
from compressor.selection.options import option_models, read_options

_ANNEALED, _HELD = "annealed", "held"
_EVALUATIONS = 12
"""Minimum number of evaluations unless the recipe sets one, so that the metric gives a curve."""


class Dynamics(Study):
    """`dsp` from the same weights, with its temperature annealed and with it held at its first value."""

    description = "training dynamics of dsp with annealing and without"
    axes: ClassVar = {"keeps": ("16.7%",), "seeds": ()}

    @classmethod
    def check(cls, request: StudyRequest) -> None:
        check_options(request.recipe.selection.options, ["dsp"])

    def cells(self) -> list[Cell]:
        return [
            Cell(f"{way}-k{keep}-s{seed}", {"way": way, "keep": keep, "seed": seed})
            for seed in self.axis("seeds")
            for keep in self.keeps()
            for way in (_ANNEALED, _HELD)
        ]

    def run(self, cell: Cell, work: Path, on_progress: ProgressCallback) -> Result:
        context, data = self.context, self.context.data
        context.reset_model()
        models = [read_options("dsp", {}, model, data.task.name) for model in option_models("dsp")]
        defaults = {name: value for model in models for name, value in model.model_dump().items()}
        options: dict[str, Any] = {**defaults, **context.options_of("dsp")}
        if not {"evaluations", "dsp.evaluations"} & context.recipe.selection.options.keys():
            options["evaluations"] = max(options["evaluations"], _EVALUATIONS)
        if cell.settings["way"] == _HELD:
            options["tau_end"] = options["tau_ini"]
        keep, seed = cell.settings["keep"], cell.settings["seed"]
        selected = context.select_heads("dsp", keep, seed, work, on_progress, **options)
        return {
            "heads": selected.plan.heads_kept,
            "kept": kept_heads(selected.plan),
            "eval": data.task.score(context.answers(selected.plan, data.eval)),
            "test": data.task.score(context.answers(selected.plan, data.test)),
            "curves": [{"step": point.step, **point.values} for point in selected.curves],
        }

    def findings(self, results: Sequence[Result]) -> Findings:
        cells = sorted(
            results, key=lambda cell: (-cell["settings"]["keep"], cell["settings"]["way"], cell["settings"]["seed"])
        )
        task = self.context.data.task
        by, evaluated = task.metric_unit.scale, f"eval_{task.chooser.metric}"
        lines, pictures = [], []
        groups: dict[tuple[int, str], list[Result]] = {}
        for cell in cells:
            groups.setdefault((cell["settings"]["keep"], cell["settings"]["way"]), []).append(cell)
        for (keep, way), same in groups.items():
            settled = [_settled(cell["curves"]) for cell in same]
            lines.append(
                (
                    way,
                    str(keep),
                    str(len(same)),
                    f"{by * float(np.mean([cell['test'] for cell in same])):.2f}",
                    ", ".join("never" if step is None else str(step) for step in settled),
                )
            )
        for keep in dict.fromkeys(keep for keep, _ in groups):
            ways = {way: _mean(same) for (count, way), same in groups.items() if count == keep}
            panels = [
                (label, {way: [(x, scale * y) for x, y in selected.get(name, [])] for way, selected in ways.items()})
                for name, label, scale in (
                    (evaluated, f"eval {task.chooser.metric_heading}", task.chooser.metric_unit.scale),
                    ("overlap", "kept now and at the end, %", 100.0),
                    ("temperature", "temperature", 1.0),
                )
            ]
            pictures.append(
                Picture(
                    f"dynamics_k{keep}",
                    f"Learning with {keep} of {len(self.context.heads)} heads",
                    "Mean over seeds. The overlap is the share of the heads kept at the end that would be kept now.",
                    figures.curves(panels, "step"),
                    wide=True,
                )
            )
        rows = [
            {**cell["settings"], **point, "final_test": cell["test"], "seconds": cell["seconds"]}
            for cell in cells
            for point in cell["curves"]
        ]
        columns = ("temperature", "heads", "n", "test", "settled at step")
        title = f"{task.metric_heading}: mean over n seeds; the heads are settled once they no longer change"
        return Findings(rows, [Table(title, columns, tuple(lines))], pictures)


def _settled(curves: Sequence[dict[str, float]]) -> int | None:
    """The first step from which on the selected heads are the final ones; None if that is the last step."""
    overlap = [(int(point["step"]), point["overlap"]) for point in curves if "overlap" in point]
    last = max((index for index, (_, share) in enumerate(overlap) if share < 1), default=-1)
    return overlap[last + 1][0] if last + 2 < len(overlap) else None


def _mean(cells: Sequence[Result]) -> dict[str, list[tuple[float, float]]]:
    """Every curve as (step, mean over the cells)."""
    selected: dict[str, dict[int, list[float]]] = {}
    for cell in cells:
        for point in cell["curves"]:
            for name, value in point.items():
                selected.setdefault(name, {}).setdefault(point["step"], []).append(value)
    return {name: [(step, float(np.mean(ys))) for step, ys in sorted(line.items())] for name, line in selected.items()}
