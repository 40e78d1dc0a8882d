"""Methods x heads kept x seeds, all from the same pretrained weights with the same steps (Li et al. 2021, figure 2).

Joint methods start from the model folder. Pipelined methods and searches start from the dense run of the same seed:
the folder's weights, trained for the same number of steps with every head.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.studies import figures
from benchmarks.studies.base import Study, check_options
from benchmarks.studies.cell_store import Cell, Result
from benchmarks.studies.context import kept_heads, site_numbers
from benchmarks.studies.findings import Findings, Picture, Table, difference, difference_text
from benchmarks.studies.request import StudyRequest
from compressor.config.methods import HEAD_METHODS, METHODS
from compressor.errors import ErrorCode, UsageError, suggestion
from compressor.progress import ProgressCallback

DENSE = "dense"
"""Methods that select heads by training or by a search."""


class Grid(Study):
    """Every method at every number of heads."""

    description = "methods x heads kept x seeds"
    axes: ClassVar = {
        "methods": ("dsp", "dsp-pipelined", "ste", "hard-concrete", "taylor"),
        "keeps": (),
        "seeds": (),
    }

    @classmethod
    def check(cls, request: StudyRequest) -> None:
        for method in cls.values(request, "methods"):
            if method not in HEAD_METHODS:
                raise UsageError(
                    f"--methods {method}: no method of this study; {suggestion(method, HEAD_METHODS)}",
                    code=ErrorCode.UNKNOWN_NAME,
                    field="methods",
                    value=method,
                )
        check_options(request.recipe.selection.options, cls.values(request, "methods"))

    def cells(self) -> list[Cell]:
        heads = len(self.context.heads)
        dense = [
            Cell(f"{DENSE}-s{seed}", {"method": DENSE, "keep": heads, "seed": seed}) for seed in self.axis("seeds")
        ]
        return dense + [
            Cell(
                f"{method}-k{keep}-s{seed}",
                {"method": method, "keep": keep, "seed": seed},
                () if _joint(method) else (f"{DENSE}-s{seed}",),
            )
            for seed in self.axis("seeds")
            for keep in self.keeps()
            for method in self.axis("methods")
        ]

    def run(self, cell: Cell, work: Path, on_progress: ProgressCallback) -> Result:
        method, keep, seed = (cell.settings[name] for name in ("method", "keep", "seed"))
        weights = self.folder.scratch(f"{DENSE}-s{seed}.safetensors")
        context, data = self.context, self.context.data
        context.reset_model(None if method == DENSE or _joint(method) else weights)
        # With every head kept there is no choice to learn, and joint learning is plain fine-tuning.
        if method == DENSE:
            selected = context.select_heads("dsp", keep, seed, work, on_progress, pool="model")
        else:
            selected = context.select_heads(method, keep, seed, work, on_progress)
        if method == DENSE:
            context.save(weights)
        chosen, test = (context.answers(selected.plan, rows) for rows in (data.eval, data.test))
        return {
            "heads": selected.plan.heads_kept,
            "kept": kept_heads(selected.plan),
            "eval": data.task.score(chosen),
            "test": data.task.score(test),
            "answers": test.tolist(),
            "curves": [point.model_dump() for point in selected.curves],
            "notes": [note.text for note in selected.notes],
        }

    def findings(self, results: Sequence[Result]) -> Findings:
        selected = sorted(results, key=_order)
        task = self.context.data.task
        dense = {cell["settings"]["seed"]: cell for cell in selected if cell["settings"]["method"] == DENSE}
        rows = [self._row(cell, dense) for cell in selected]
        groups: dict[tuple[str, int], list[Result]] = {}
        for cell in selected:
            groups.setdefault((cell["settings"]["method"], cell["settings"]["keep"]), []).append(cell)
        by = task.metric_unit.scale
        lines, curves = [], []
        for (method, _), cells in groups.items():
            scores = [by * cell["test"] for cell in cells]
            bases = [dense[cell["settings"]["seed"]] for cell in cells]
            lines.append(
                (
                    method,
                    _heads(cells),
                    str(len(cells)),
                    f"{by * float(np.mean([cell['eval'] for cell in cells])):.2f}",
                    f"{np.mean(scores):.2f}",
                    f"{min(scores):.2f}-{max(scores):.2f}" if len(scores) > 1 else "",
                    "" if method == DENSE else difference_text(task, bases, cells),
                )
            )
            curves.append((method, float(np.mean([cell["heads"] for cell in cells])), scores))
        columns = ("method", "heads", "n", "eval", "test", "spread", "minus dense (95%)")
        return Findings(
            rows,
            [Table(f"{task.metric_heading}: mean over n seeds, test minus dense", columns, tuple(lines))],
            [self._curves(curves), *self._maps(groups)],
            tuple(dict.fromkeys(note for cell in selected for note in cell["notes"])),
        )

    def _row(self, cell: Result, dense: dict[int, Result]) -> dict[str, Any]:
        settings, task = cell["settings"], self.context.data.task
        base = dense[settings["seed"]]
        selected = difference(task, [np.array(base["answers"])], [np.array(cell["answers"])])
        return {
            **settings,
            "heads": cell["heads"],
            "metric": task.metric,
            "eval": cell["eval"],
            "test": cell["test"],
            "difference": selected.difference,
            "low": selected.low,
            "high": selected.high,
            "kept": site_numbers([(site, head) for site, head in cell["kept"]], self.context),
            "seconds": cell["seconds"],
        }

    def _curves(self, curves: list[tuple[str, float, list[float]]]) -> Picture:
        heading = self.context.data.task.metric_heading
        lines: dict[str, list[tuple[float, list[float]]]] = {}
        for method, heads, scores in curves:
            if method != DENSE:
                lines.setdefault(method, []).append((heads, scores))
        level = next(scores for method, _, scores in curves if method == DENSE)
        figure = figures.lines_with_ranges(lines, "heads kept", f"test {heading}", level=(DENSE, level), log=True)
        description = "Mean over seeds; the band reaches from the worst seed to the best. The grey line is dense."
        return Picture("metric_vs_heads", "Metric against heads kept", description, figure, wide=True)

    def _maps(self, groups: dict[tuple[str, int], list[Result]]) -> list[Picture]:
        pictures, distributions = [], []
        for method in dict.fromkeys(method for method, _ in groups if method != DENSE):
            shares = {keep: self._shares(cells) for (name, keep), cells in groups.items() if name == method}
            maps = [(f"{keep} heads", share) for keep, share in shares.items()]
            pictures.append(
                Picture(
                    f"kept_{method}",
                    f"Heads kept by {method}",
                    "Share of the seeds that keep a head: rows are attention layers in call order, columns heads.",
                    figures.maps(maps, low=0.0, high=1.0),
                    wide=len(maps) > 1,
                )
            )
            layers = np.stack([np.nansum(share, axis=1) for share in shares.values()], axis=1)
            distributions.append(
                Picture(
                    f"layers_{method}",
                    f"Distribution over layers, {method}",
                    "Heads kept in each attention layer (row), mean over seeds, by the number kept in all (column).",
                    figures.table_map(layers, [str(keep) for keep in shares], "heads kept in all"),
                )
            )
        return [*pictures, *distributions]

    def _shares(self, cells: Sequence[Result]) -> np.ndarray:
        """Share `[sites, heads]` of the cells that keep each head; NaN where a site has no such head."""
        kept = [{(site, head) for site, head in cell["kept"]} for cell in cells]
        return self.context.map(
            {head: float(np.mean([head in heads_kept for heads_kept in kept])) for head in self.context.heads}
        )


def _joint(method: str) -> bool:
    return method in METHODS and METHODS[method].trains_model


def _heads(cells: Sequence[Result]) -> str:
    """The requested number of heads, with the numbers kept where they differ."""
    settings, selected = cells[0]["settings"]["keep"], sorted({cell["heads"] for cell in cells})
    return str(settings) if selected == [settings] else f"{settings} ({', '.join(map(str, selected))})"


def _order(cell: Result) -> tuple[Any, ...]:
    settings = cell["settings"]
    return ((DENSE, *METHODS).index(settings["method"]), -settings["keep"], settings["seed"])
