"""The page of a ladder of budgets: its frontier as figures, and its rungs as a table."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compressor.report import formatting
from compressor.report.figures import COMPRESSED, DENSE, MUTED, STYLE, inline
from compressor.report.frontier import FRONTIER_HTML, FRONTIER_JSON, Frontier, frontier_rows
from compressor.report.templates import environment
from compressor.workdir import write_json
from graph_passes.files import atomic_replace

_WIDTH, _HEIGHT = 4.4, 2.8  # inches


def write(frontier: Frontier, folder: Path) -> None:
    """Write `frontier.html` and `frontier.json` into the folder of the rungs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FRONTIER_JSON, frontier.model_dump(mode="json"))
    with atomic_replace(folder / FRONTIER_HTML) as temporary:
        Path(temporary).write_text(render(frontier), encoding="utf-8")


def render(frontier: Frontier) -> str:
    """The page as HTML."""
    headings, rows = frontier_rows(frontier)
    sizes = range(len(frontier.rungs[0].speeds)) if frontier.rungs and frontier.rungs[0].scores else range(0)
    figures = [(frontier.rungs[0].speeds[size].size_label, figure(frontier, size)) for size in sizes]
    tiles = [
        (rung.name, f"{rung.ratio:.3g}×", "; ".join(formatting.difference_and_range(s)[0] for s in rung.scores))
        for rung in frontier.rungs
    ]
    tone = "bad" if frontier.max_drop is not None and frontier.fastest is None else "good"
    page = environment("report").get_template("frontier_page.html")
    return page.render(frontier=frontier, headings=headings, rows=rows, figures=figures, tiles=tiles, tone=tone)


def figure(frontier: Frontier, size: int) -> Markup:
    """The metric of the rungs against their speed at one size, with intervals on both axes.

    Args:
        frontier: rungs with at least one score.
        size: index of the size among the speeds of a rung.
    """
    with matplotlib.rc_context(STYLE):
        drawn = Figure((_WIDTH, _HEIGHT), layout="constrained")
        axes = drawn.add_subplot()
        scale = frontier.rungs[0].scores[0].unit.scale
        axes.axhline(scale * frontier.rungs[0].scores[0].dense, color=DENSE, linewidth=1)
        for method, rungs in frontier.others.items():
            compared = [(rung.speeds[size].ratio, scale * rung.scores[0].compressed) for rung in rungs]
            axes.plot(*zip(*compared, strict=True), color=MUTED, linewidth=1, marker="s", ms=4, fillstyle="none")
            axes.annotate(method, compared[-1], (4, -9), textcoords="offset points", color=MUTED)
        points = [(rung.speeds[size].ratio, scale * rung.scores[0].compressed) for rung in frontier.rungs]
        axes.plot(*zip(*points, strict=True), color=COMPRESSED, linewidth=1)
        for rung, (ratio, value) in zip(frontier.rungs, points, strict=True):
            speed, score = rung.speeds[size], rung.scores[0]
            colour = COMPRESSED if speed.void is None else MUTED
            axes.plot((speed.low, speed.high), (value, value), color=colour, linewidth=2)
            ends = scale * (score.dense + score.low), scale * (score.dense + score.high)
            axes.plot((ratio, ratio), ends, color=colour, linewidth=2)
            axes.plot(ratio, value, "o", color=colour, ms=6, fillstyle="none" if rung.holds is False else "full")
        axes.set(xlabel="times the speed of dense", ylabel=formatting.metric_name(frontier.rungs[0].scores[0]))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid(axis="y")
        return inline(drawn)
