"""The page of a ladder of budgets: figures of the metric against the speed, and a table of the rungs.

Figures contain no names; engines of other tools are marked with the numbers of their rows in a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from compressor.report import formatting
from compressor.report.frontier import FRONTIER_HTML, FRONTIER_JSON, Frontier, dense_p50, frontier_rows, point_rows
from compressor.report.html import environment
from compressor.report.plot import COMPRESSED, DENSE, INK, MUTED, Axis, Plot, inline
from compressor.workdir import write_json
from graph_passes.files import write_text

_HEIGHT = 200.0  # pixels


def write(frontier: Frontier, folder: Path) -> None:
    """Write `frontier.html` and `frontier.json` into the folder of the rungs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FRONTIER_JSON, frontier.model_dump(mode="json"))
    write_text(folder / FRONTIER_HTML, render(frontier))


def render(frontier: Frontier) -> str:
    """The page as HTML."""
    headings, rows = frontier_rows(frontier)
    measured = {tuple(speed.size_label for speed in rung.speeds) for rung in frontier.rungs}
    are_alike = len(measured) == 1 and all(rung.scores for rung in frontier.rungs)
    sizes = range(len(frontier.rungs[0].speeds)) if frontier.rungs and are_alike else range(0)
    figures = [(frontier.rungs[0].speeds[size].size_label, _figure(frontier, size)) for size in sizes]
    tiles = [
        (
            rung.name,
            f"{rung.ratio:.3g}×" if rung.ratio else "not timed",
            "; ".join(formatting.difference_and_range(score)[0] for score in rung.headline),
        )
        for rung in frontier.rungs
    ]
    tone = "bad" if frontier.is_missed else "good"
    page = environment().get_template("frontier_page.html")
    tables = {"headings": headings, "rows": rows, "points": point_rows(frontier)}
    return page.render(frontier=frontier, figures=figures, tiles=tiles, tone=tone, **tables)


class Mark(NamedTuple):
    """A point of the figure: its speed over dense and its metric, each with the ends of the interval.

    `fills` is False for a rung that loses more than is allowed, and `is_void` is True for a speed that is no result.
    """

    speed: tuple[float, float, float]
    metric: tuple[float, float, float]
    fills: bool = True
    is_void: bool = False


class Series(NamedTuple):
    """Points of one colour: circles that a line joins, or with a label diamonds."""

    marks: tuple[Mark, ...]
    colour: str
    label: str = ""


def _figure(frontier: Frontier, size: int) -> Markup:
    """The metric of the rungs against their speed at one size, with intervals on both axes."""
    score, drawn = frontier.rungs[0].headline[0], list(all_series(frontier, size))
    dense, marks = score.unit.scale * score.dense, [mark for series in drawn for mark in series.marks]
    x = Axis.of([end for mark in marks for end in mark.speed], "times the speed of dense")
    metrics = [dense, *(end for mark in marks for end in mark.metric)]
    plot = Plot(x, Axis.of(metrics, formatting.metric_name(score), has_grid=True), _HEIGHT)
    plot.line(((x.low, dense), (x.high, dense)), DENSE, 1)
    for series in drawn:
        _draw(plot, series)
    return inline(plot)


def all_series(frontier: Frontier, size: int) -> Iterator[Series]:
    """The engines of other tools, and the rungs, of which each has scores, at one of the sizes of a rung's speeds."""
    dense, scale = dense_p50([rung.speeds[size] for rung in frontier.rungs]), frontier.rungs[0].headline[0].unit.scale
    for number, point in enumerate(frontier.points, 1):
        if point.is_at(frontier.rungs[0].speeds[size]):
            low, high = point.metric_interval or (point.metric, point.metric)
            mark = Mark(point.speed_over(dense), (scale * point.metric, scale * low, scale * high))
            yield Series((mark,), INK, f"{number}")
    marks = []
    for rung in frontier.rungs:
        speed, score = rung.speeds[size], rung.headline[0]
        shown = (score.compressed, score.dense + score.low, score.dense + score.high)
        value, low, high = (score.unit.scale * number for number in shown)
        ends = (speed.ratio, speed.low, speed.high)
        marks.append(Mark(ends, (value, low, high), rung.holds is not False, bool(speed.void)))
    yield Series(tuple(marks), COMPRESSED)


def _draw(plot: Plot, series: Series) -> None:
    """Draw points with both of their intervals."""
    points = [(mark.speed[0], mark.metric[0]) for mark in series.marks]
    if not series.label:
        plot.line(points, series.colour, 1)
    for point, mark in zip(points, series.marks, strict=True):
        colour = MUTED if mark.is_void else series.colour
        plot.line([(end, point[1]) for end in mark.speed[1:]], colour, 2)
        plot.line([(point[0], end) for end in mark.metric[1:]], colour, 2)
        plot.marks([point], colour, 6, is_filled=mark.fills, is_diamond=bool(series.label))
    plot.text(points[-1], series.label, series.colour, (4, 12))
