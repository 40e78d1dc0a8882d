"""The findings of a study: rows, tables, pictures and a summary, and the files that they are written to."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.studies.cell_store import Result
from benchmarks.studies.figures import styled
from compressor.measure import paired_interval
from compressor.measure.bootstrap import Interval
from compressor.report.html import environment
from compressor.report.plot import file_text
from compressor.tasks.base import Task
from compressor.tasks.metrics import accuracy
from graph_passes.files import atomic_replace, write_text

_PAGE = Path(__file__).with_name("page.html")
_RESAMPLES = 2000


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A figure with its description and the name of its file; `wide`: as wide as the page."""

    name: str
    title: str
    description: str
    figure: Figure
    wide: bool = False


@dataclass(frozen=True)
class Findings:
    """The results of a study.

    Attributes:
        rows: the CSV.
        tables: printed, and on the page.
        pictures: on the page, and as files.
        summary: the conclusions, a sentence each.
    """

    rows: Sequence[Mapping[str, Any]]
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    summary: Sequence[str] = field(default_factory=tuple)

    def save(
        self,
        folder: Path,
        *,
        kind: str,
        description: str,
        model: str,
        tiles: Sequence[tuple[str, str, str]],
        facts: Sequence[tuple[str, str]],
    ) -> None:
        """Write `study.csv`, `figures/*.svg` and the self-contained page `study.html`, each under a temporary name that
        is then renamed.

        Args:
            folder: folder of the study.
            kind, description, model: for the head of the page.
            tiles: heading, number and caption of each tile.
            facts: name and value of each setting.
        """
        write_csv(folder / "study.csv", self.rows)
        (folder / "figures").mkdir(exist_ok=True)
        drawn = [(picture, styled(picture.figure)) for picture in self.pictures]
        for picture, svg in drawn:
            write_text(folder / "figures" / f"{picture.name}.svg", file_text(svg))
        page = environment().from_string(_PAGE.read_text(encoding="utf-8"))
        values = {"name": model, "kind": kind, "verdict": description, "tiles": tiles, "facts": facts}
        write_text(folder / "study.html", page.render(findings=self, pictures=drawn, **values))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per row; the columns are those of all rows, in order of first use."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_replace(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, columns, lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


def difference(
    task: Task, dense: Sequence[np.ndarray], compared: Sequence[np.ndarray], confidence: float = 0.95
) -> Interval:
    """Mean metric of `compared` minus that of `dense`, with a paired bootstrap interval over the rows.

    Args:
        task: computes the metric.
        dense, compared: statistics `[examples, k]` of each run (a seed each); each draw takes the same rows of all.
        confidence: of the interval.
    """

    def mean(stacked: np.ndarray) -> float:
        return float(np.mean([task.score(stacked[:, run]) for run in range(stacked.shape[1])]))

    first, second = (np.stack(runs, axis=1) for runs in (dense, compared))
    score: Callable[[np.ndarray], float] = mean
    if _is_row_accuracy(task):  # the mean over rows; a draw needs no scoring of its own
        first, second = ((stacked[..., 0] == stacked[..., 1]).mean(axis=1) for stacked in (first, second))
        score = _average
    return paired_interval(first, second, score, 0, confidence=confidence, resamples=_RESAMPLES)


def _is_row_accuracy(task: Task) -> bool:
    """Whether the metric is the share of right rows, which that of tokens is not, although both are named accuracy."""
    return any(metric.name == task.metric and metric.compute is accuracy for metric in task.metrics)


def _average(values: np.ndarray) -> float:
    return float(values.mean())


def interval_text(interval: Interval, task: Task) -> str:
    """A difference of the task's metric with its interval, in points: `-1.20 (-2.31 to -0.10)`."""
    by = task.metric_unit.scale
    return f"{by * interval.difference:+.2f} ({by * interval.low:+.2f} to {by * interval.high:+.2f})"


def difference_text(task: Task, dense: Sequence[Result], cells: Sequence[Result]) -> str:
    """Test metric minus dense over all seeds, in points."""
    before, after = ([np.array(cell["answers"]) for cell in side] for side in (dense, cells))
    return interval_text(difference(task, before, after), task)
