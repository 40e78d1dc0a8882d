"""The findings of a study of blocks (attention pruning, tables 3 to 10 and figure 6).

One line per share, kind of attention and source of masks, curves, and a table of masks of one data set on the rows of
another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from compressor.studies import figures
from compressor.studies.base import Result
from compressor.studies.context import StudyContext
from compressor.studies.grid import difference_text
from compressor.studies.results import Findings, Picture, Table, difference

DENSE, RETRAINED = "dense", "retrained"
ALL = "all"
FROM_THIS_DATA, RANDOM = "own", "random"
_SHARE = "share of blocks dropped, p"
_SAVED = (
    "the share of attention's multiply-accumulates that is skipped (scores and weighted sums, not projections): the"
    " share of dropped blocks among those that rows reach and causality permits, mean over the heads of all layers"
)

Group = tuple[str, str, float]
"""Source of the masks, kinds of attention, and share of blocks; the cells of a group differ in their seeds."""


class BlocksFindings:
    """The findings of the cells that are finished.

    Args:
        results: results of the cells.
        context: model and rows.
        names: names of the data sets that masks come from; the first is that of the rows.

    Attributes:
        results: the results in order of source of the masks, kind, share and seed.
    """

    def __init__(self, results: Sequence[Result], context: StudyContext, names: Sequence[str]) -> None:
        self.results, self.context, self.names = sorted(results, key=_order), context, names
        self.task = context.data.task
        self.points = self.task.metric_unit.scale
        dense, retrained = (
            {cell["settings"]["seed"]: cell for cell in self.results if cell["settings"]["masks"] == name}
            for name in (DENSE, RETRAINED)
        )
        # The baseline of the differences.
        self.control, self.base = (retrained, RETRAINED) if retrained.keys() == dense.keys() else (dense, DENSE)
        self.groups: dict[Group, list[Result]] = {}
        for cell in self.results:
            settings = cell["settings"]
            self.groups.setdefault((settings["masks"], settings["kind"], settings["share"]), []).append(cell)

    def findings(self) -> Findings:
        """Rows, tables, and the curves."""
        columns = ("masks", "kind", "p", "n", "eval", "test", "spread", f"minus {self.base} (95%)", "MACs saved")
        lines = tuple(self._line(group, cells) for group, cells in self.groups.items())
        measure = self.task.metric_heading
        tables, crossed = self._crossed()
        return Findings(
            [self._row(cell) for cell in self.results],
            [Table(f"{measure}: mean over n seeds, test minus {self.base}", columns, lines), *tables],
            [self._curves(), self._saved(), *crossed],
            (f"MACs saved: {_SAVED}",),
        )

    def _line(self, group: Group, cells: Sequence[Result]) -> tuple[str, ...]:
        masks, kind, share = group
        scores = [self.points * cell["test"] for cell in cells]
        bases = [self.control[cell["settings"]["seed"]] for cell in cells]
        return (
            masks,
            kind,
            f"{share:g}",
            str(len(cells)),
            f"{self.points * float(np.mean([cell['eval'] for cell in cells])):.2f}",
            f"{np.mean(scores):.2f}",
            f"{min(scores):.2f}-{max(scores):.2f}" if len(scores) > 1 else "",
            "" if masks in (DENSE, self.base) else difference_text(self.task, bases, cells),
            f"{100 * (1 - float(np.mean([self._macs_left(cell) for cell in cells]))):.0f}%",
        )

    def _curves(self) -> Picture:
        scores = self._against_share(lambda cell: self.points * cell["test"])
        level = (self.base, [self.points * cell["test"] for cell in self.control.values()])
        return Picture(
            "metric_vs_p",
            "Metric against the share of blocks dropped",
            f"Mean over seeds; the band reaches from the worst seed to the best. The grey line is {self.base}.",
            figures.lines_with_ranges(scores, _SHARE, f"test {self.task.metric_heading}", level=level),
            wide=True,
        )

    def _saved(self) -> Picture:
        saved = self._against_share(lambda cell: 100 * (1 - self._macs_left(cell)))
        return Picture(
            "macs_saved",
            "Multiply-accumulates of attention saved",
            f"Here {_SAVED}.",
            figures.lines_with_ranges(saved, _SHARE, "saved, %"),
            wide=True,
        )

    def _against_share(self, value: Callable[[Result], float]) -> dict[str, list[tuple[float, list[float]]]]:
        """Source of masks and kind of attention -> (share of blocks dropped, values of the seeds)."""
        lines: dict[str, list[tuple[float, list[float]]]] = {}
        for (masks, kind, share), cells in self.groups.items():
            if share:
                lines.setdefault(f"{masks}, {kind}", []).append((share, [value(cell) for cell in cells]))
        return lines

    def _crossed(self) -> tuple[list[Table], list[Picture]]:
        """Masks of every source on the rows of the first data set, by share (figure 6); empty for a single source."""
        target = self.names[0] if self.names else ""
        shown = {FROM_THIS_DATA: target, **{name: name for name in self.names[1:]}, RANDOM: RANDOM}
        tables, pictures = list[Table](), list[Picture]()
        for kind in dict.fromkeys(kind for _, kind, share in self.groups if share):
            sources = [masks for masks in shown if any(key[:2] == (masks, kind) for key in self.groups)]
            levels = sorted({share for _, each, share in self.groups if share and each == kind})
            if not set(self.names[1:]) & set(sources):
                continue
            values = np.full((len(sources), len(levels)), np.nan)
            for row, masks in enumerate(sources):
                for column, share in enumerate(levels):
                    if cells := self.groups.get((masks, kind, share)):
                        lost = [cell["test"] - self.control[cell["settings"]["seed"]]["test"] for cell in cells]
                        values[row, column] = self.points * float(np.mean(lost))
            heads = tuple(f"p = {share:g}" for share in levels)
            measure = f"{self.task.metric_heading} on {target}, minus {self.base}"
            description = f"{measure}, by source of the masks; {kind} attention"
            lines = tuple(
                (shown[masks], *("" if np.isnan(value) else f"{value:+.2f}" for value in line))
                for masks, line in zip(sources, values, strict=True)
            )
            tables.append(Table(description, ("masks from", *heads), lines))
            rows = "; ".join(f"{index} {shown[masks]}" for index, masks in enumerate(sources, 1))
            figure = figures.table_map(values, [f"{share:g}" for share in levels], "p", places=2, first=1)
            name = f"crossed_{kind.replace('+', '_')}"
            pictures.append(Picture(name, "Masks of one data set on another", f"{description}. {rows}.", figure))
        return tables, pictures

    def _macs_left(self, cell: Result) -> float:
        """Share of the blocks that is computed, mean over the heads of all layers; 1 without a mask."""
        kept = cell["density"] or {}
        left = [np.mean(kept[site.name]) if site.name in kept else 1.0 for site in self.context.sites]
        heads = [site.heads for site in self.context.sites]
        return float(np.average(left, weights=heads))

    def _row(self, cell: Result) -> dict[str, Any]:
        base = self.control[cell["settings"]["seed"]]
        interval = difference(self.task, [np.array(base["answers"])], [np.array(cell["answers"])])
        return {
            **cell["settings"],
            "metric": self.task.metric,
            "eval": cell["eval"],
            "test": cell["test"],
            "difference": interval.difference,
            "low": interval.low,
            "high": interval.high,
            "macs_left": self._macs_left(cell),
            "seconds": cell["seconds"],
        }


def _order(cell: Result) -> tuple[Any, ...]:
    settings = cell["settings"]
    first = {DENSE: 0, RETRAINED: 1, FROM_THIS_DATA: 2, RANDOM: 3}.get(settings["masks"], 4)
    return first, settings["masks"], settings["kind"], settings["share"], settings["seed"]
