"""The page of a ladder of budgets: its frontier as figures, and its rungs as a table."""

from __future__ import annotations

from pathlib import Path

from compressor.report import formatting
from compressor.report.frontier import FRONTIER_HTML, FRONTIER_JSON, Frontier, frontier_rows, point_rows
from compressor.report.frontier_figure import figure
from compressor.report.templates import environment
from compressor.workdir import write_json
from graph_passes.files import write_text


def write(frontier: Frontier, folder: Path) -> None:
    """Write `frontier.html` and `frontier.json` into the folder of the rungs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FRONTIER_JSON, frontier.model_dump(mode="json"))
    write_text(folder / FRONTIER_HTML, render(frontier))


def render(frontier: Frontier) -> str:
    """The page as HTML."""
    headings, rows = frontier_rows(frontier)
    measured = {tuple(speed.size_label for speed in rung.speeds) for rung in frontier.all_rungs}
    are_alike = len(measured) == 1 and all(rung.scores for rung in frontier.all_rungs)
    sizes = range(len(frontier.rungs[0].speeds)) if frontier.rungs and are_alike else range(0)
    figures = [(frontier.rungs[0].speeds[size].size_label, figure(frontier, size)) for size in sizes]
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
