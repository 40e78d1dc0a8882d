"""The findings of a study of speed: tables and figures of time and size against heads kept, batch size and metric."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from compressor.studies import figures
from compressor.studies.base import Result
from compressor.studies.context import StudyContext
from compressor.studies.results import Findings, Picture, Table
from compressor.tasks.registry import metric_named

_KINDS = ("mask", "batch", "grid")
_SPEED = "times the speed of dense"
_SMALLER = "file smaller by, %"


class SpeedFindings:
    """The findings of the cells that are finished. Void timings are left out of tables and figures.

    Args:
        results: results of the cells.
        context: the model.
        grid_cells: names of the cells of the grid studies that are named now; other selections are left out.
    """

    def __init__(self, results: Sequence[Result], context: StudyContext, grid_cells: Collection[str]) -> None:
        self.context = context
        self.dense = next(cell for cell in results if cell["settings"]["what"] == "dense")
        timed = [
            cell for cell in results if cell["settings"]["what"] in ("mask", "batch") or cell["cell"] in grid_cells
        ]
        self.timed = sorted(timed, key=_order)
        self.valid = [cell for cell in self.timed if not cell["void"]]

    def findings(self) -> Findings:
        """Rows, tables, figures, and a summary."""
        tables: list[Table] = []
        pictures: list[Picture] = []
        for section in (self._masks, self._batches, self._selections):
            section_tables, section_pictures = section()
            tables += section_tables
            pictures += section_pictures
        return Findings([self._row(cell) for cell in self.timed], tables, pictures, self._void_timings())

    def _row(self, cell: Result) -> dict[str, Any]:
        return {
            **{name: value for name, value in cell["settings"].items() if name != "kept"},
            **{name: value for name, value in cell.items() if name not in ("settings", "cell")},
            "parameters_dense": self.dense["parameters"],
            "bytes_dense": self.dense["bytes"],
        }

    def _void_timings(self) -> list[str]:
        void = [cell["void"] for cell in self.timed if cell["void"]]
        return [f"{len(void)} of {len(self.timed)} timings are void and left out: {void[0]}"] if void else []

    def _grouped(self, kind: str, setting: str) -> dict[int, list[Result]]:
        groups: dict[int, list[Result]] = {}
        for cell in self.valid:
            if cell["settings"]["what"] == kind:
                groups.setdefault(cell["settings"][setting], []).append(cell)
        return groups

    def _smaller(self, cell: Result) -> float:
        """Reduction of the file's size against dense, in percent."""
        return 100 * (1 - cell["bytes"] / self.dense["bytes"])

    def _masks(self) -> tuple[list[Table], list[Picture]]:
        groups = self._grouped("mask", "keep")
        if not groups:
            return [], []
        speed = {keep: [cell["ratio"] for cell in cells] for keep, cells in groups.items()}
        smaller = {keep: [self._smaller(cell) for cell in cells] for keep, cells in groups.items()}
        lines = tuple(
            (
                str(keep),
                str(len(speed[keep])),
                f"{np.mean(speed[keep]):.2f}",
                f"{min(speed[keep]):.2f}-{max(speed[keep]):.2f}",
                f"{np.mean([cell['parameters'] for cell in cells]) / 1e6:.2f}M",
                f"{np.mean(smaller[keep]):.1f}%",
            )
            for keep, cells in groups.items()
        )
        batch = next(iter(groups.values()))[0]["settings"]["batch"]
        title = f"Random masks at batch {batch}: times the speed of dense, and the file that they leave"
        columns = ("heads", "masks", "speed", "spread", "parameters", "file smaller by")
        description = "Mean over random masks; the band reaches from the least to the most."
        of_speed = figures.lines_with_ranges({"speed": list(speed.items())}, "heads kept", _SPEED, wide=False)
        of_size = figures.lines_with_ranges({"size": list(smaller.items())}, "heads kept", _SMALLER, wide=False)
        return [Table(title, columns, lines)], [
            Picture("speed_vs_heads", "Speed against heads kept", description, of_speed),
            Picture("size_vs_heads", "Size against heads kept", description, of_size),
        ]

    def _batches(self) -> tuple[list[Table], list[Picture]]:
        groups = self._grouped("batch", "batch")
        if not groups:
            return [], []
        half = next(iter(groups.values()))[0]["heads"]
        lines = tuple(
            (
                str(batch),
                _mean_and_deviation([cell["dense_per_second"] for cell in cells]),
                _mean_and_deviation([cell["per_second"] for cell in cells]),
                f"{100 * (np.mean([cell['ratio'] for cell in cells]) - 1):+.1f}%",
            )
            for batch, cells in groups.items()
        )
        title = f"Examples per second with {half} of {len(self.context.heads)} heads (mean and deviation over masks)"
        curves = {
            name: [(batch, [cell[key] for cell in cells]) for batch, cells in groups.items()]
            for name, key in (("dense", "dense_per_second"), (f"{half} heads", "per_second"))
        }
        figure = figures.lines_with_ranges(curves, "batch", "examples per second", log=True, wide=False)
        picture = Picture("speed_vs_batch", "Examples per second", "Dense, and with half of the heads.", figure)
        return [Table(title, ("batch", "dense", "pruned", "faster by"), lines)], [picture]

    def _selections(self) -> tuple[list[Table], list[Picture]]:
        cells = [cell for cell in self.valid if cell["settings"]["what"] == "grid"]
        if not cells:
            return [], []
        metric = metric_named(cells[0]["settings"]["metric"], self.context.folder)
        test = [metric.unit.scale * cell["settings"]["test"] for cell in cells]
        lines = tuple(
            (
                cell["settings"]["method"],
                str(cell["heads"]),
                str(cell["settings"]["seed"]),
                f"{score:.2f}",
                f"{cell['ratio']:.2f}",
                f"{self._smaller(cell):.1f}%",
            )
            for cell, score in zip(cells, test, strict=True)
        )
        speed: dict[str, list[tuple[float, float]]] = {}
        size: dict[str, list[tuple[float, float]]] = {}
        for cell, score in zip(cells, test, strict=True):
            method = cell["settings"]["method"]
            speed.setdefault(method, []).append((score, cell["ratio"]))
            size.setdefault(method, []).append((score, self._smaller(cell)))
        name, description = f"test {metric.heading}", "Each choice of the grid."
        columns = ("method", "heads", "seed", name, "speed", "file smaller by")
        table = Table("What the choices of a grid are worth", columns, lines)
        return [table], [
            Picture("speed_vs_metric", "Speed against the metric", description, figures.scatter(speed, name, _SPEED)),
            Picture("size_vs_metric", "Size against the metric", description, figures.scatter(size, name, _SMALLER)),
        ]


def _order(cell: Result) -> tuple[Any, ...]:
    return (_KINDS.index(cell["settings"]["what"]), cell["settings"]["batch"], -cell["heads"])


def _mean_and_deviation(values: Sequence[float]) -> str:
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1) if len(values) > 1 else 0.0:.1f}"
