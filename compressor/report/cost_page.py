"""Cost tables as curves of the time of a group of units over its number of kept units: as text, page and picture."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compressor.measure.costs import CostTable
from compressor.report import formatting
from compressor.report.figures import COMPRESSED, INK, LINE, MUTED, STYLE, inline, new_axes
from compressor.report.html import environment

_BAR, _EIGHTHS = 24, " ▏▎▍▌▋▊▉█"  # characters of the longest bar, and one that is filled to each eighth
_TYPES = {"heads": ("attention", "attentions"), "neurons": ("feed-forward", "feed-forwards")}
_WIDTH, _HEIGHT = 4.4, 2.4  # inches of one panel
_IN_FILES = {COMPRESSED: "#0b7a75", INK: "#b3261e", LINE: "#dcdfe4", MUTED: "#59616c"}
"""Colours of a picture in a file, in place of the colours of the page."""
_PAGE_COLOURS = {colour: colour for colour in _IN_FILES}


class CostPoint(NamedTuple):
    """A number of units that was timed: the time that it adds to a call, and the share of all groups of the model.

    At a cliff, `faster` is the next larger number of units, which takes less time; else it is None.
    """

    units: int
    ms: float
    share: float
    faster: int | None = None


class CostCurve(NamedTuple):
    """Groups that cost the same: `5 attentions`, the type of their units, and their names with `*` where these differ.

    The points are in ascending order of the numbers of units; the last point has all units.
    """

    title: str
    unit: str
    pattern: str
    points: tuple[CostPoint, ...]


def curves_of(table: CostTable) -> list[CostCurve]:
    """A curve for each class of equal groups, as fitted to measurements, with their cliffs and noise."""
    curves = []
    for row in table.rows:
        number, full = len(row.groups), row.savings[0]
        cliffs = {count: larger for count, larger in itertools.pairwise(row.counts) if count in row.cliffs}
        points = [
            CostPoint(count, full - saving, number * (full - saving) / table.whole, cliffs.get(count))
            for count, saving in zip(row.counts, row.savings, strict=True)
        ]
        title = f"{number} {_TYPES[row.type][number != 1]}"
        pattern = formatting.common_labels(row.groups)[1] or row.groups[0]
        curves.append(CostCurve(title, row.type, pattern, tuple(points)))
    return curves


def curve_rows(curve: CostCurve) -> tuple[tuple[str, ...], ...]:
    """A row for each number of units: units kept, time of one group, share of the model, and cliff."""
    return tuple(
        (
            f"{point.units:,}",
            formatting.ms(point.ms),
            f"{point.share:.1%}".replace("-", "−"),
            "" if point.faster is None else f"cliff: slower than {point.faster:,}",
        )
        for point in curve.points
    )


def curve_bars(curve: CostCurve) -> tuple[str, ...]:
    """A bar for each number of units, as long as the time of one group, relative to the longest time of the curve."""
    longest = max(point.ms for point in curve.points)
    eighths = [round(8 * _BAR * max(point.ms, 0.0) / longest) if longest > 0 else 0 for point in curve.points]
    return tuple(f"{_EIGHTHS[8] * (part // 8)}{_EIGHTHS[part % 8]}".rstrip() for part in eighths)


def headline(table: CostTable) -> str:
    """The time of a call, the shares of it that can be removed, and the largest speed-up by removing units."""
    types = {row.type: _TYPES[row.type][0] for row in table.rows}
    parts = " and ".join(f"{name} {table.share_of(unit):.0%}" for unit, name in sorted(types.items()))
    whole, least, dense = map(formatting.ms, (table.whole, table.least, table.dense))
    text = f"{table.size_label}, {table.engine}: {whole}, of which {parts}"
    limit = table.dense / table.least
    return f"{text}; dense takes {dense}, and {least} remain without any unit: at most {limit:.3g}× as fast as dense"


def render(model: str, engine: str, tables: Sequence[CostTable]) -> str:
    """The page: for each size a figure for each class of equal groups, and the numbers as a table."""
    sections, tiles = [], []
    for table in tables:
        curves = [(curve, _svg(curve), curve_rows(curve)) for curve in curves_of(table)]
        sections.append({"label": table.size_label, "headline": headline(table), "curves": curves})
        limit = f"{table.dense / table.least:.3g}×"
        tiles.append((f"limit, {table.size_label}", limit, f"of dense, {formatting.ms(table.dense)}"))
    page = environment().get_template("cost_page.html")
    return page.render(name=model, engine=engine, sections=sections, tiles=tiles)


def picture(tables: Sequence[CostTable]) -> bytes:
    """A PNG with a row of panels for each size, a panel for each class of equal groups."""
    curves = [curves_of(table) for table in tables]
    columns = max(map(len, curves))
    with matplotlib.rc_context(_style(_IN_FILES)):
        figure = Figure((_WIDTH * columns, _HEIGHT * len(tables)), layout="constrained", facecolor="white")
        for row, (table, members) in enumerate(zip(tables, curves, strict=True)):
            for column, curve in enumerate(members):
                axes = figure.add_subplot(len(tables), columns, row * columns + column + 1)
                _draw(axes, curve, _IN_FILES)
                axes.set_title(f"{curve.title}, {table.size_label}", fontsize=9, color=_IN_FILES[MUTED])
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=150, metadata={"Software": None})
    return content.getvalue()


def _svg(curve: CostCurve) -> Markup:
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes(_HEIGHT)
        _draw(axes, curve, _PAGE_COLOURS)
        return inline(figure)


def _draw(axes: Axes, curve: CostCurve, colours: dict[str, str]) -> None:
    """The time of one group against its units, with cliffs as hollow marks."""
    units, times = [point.units for point in curve.points], [point.ms for point in curve.points]
    axes.plot(units, times, color=colours[COMPRESSED], linewidth=1.4, marker="o", ms=3.5)
    cliffs = [point for point in curve.points if point.faster is not None]
    marks = [point.units for point in cliffs], [point.ms for point in cliffs]
    axes.plot(*marks, "o", color=colours[INK], ms=8, fillstyle="none", linestyle="none")
    axes.set(xlim=(-0.03 * max(units), 1.03 * max(units)), ylim=(1.1 * min(0.0, *times), 1.1 * max(*times, 1e-9)))
    axes.set(xlabel=f"{curve.unit} kept", ylabel="milliseconds")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y")


def _style(colours: dict[str, str]) -> dict[Any, Any]:
    """The style of figures with other colours."""
    return {name: colours.get(value, value) if isinstance(value, str) else value for name, value in STYLE.items()}
