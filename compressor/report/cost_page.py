"""Cost tables as curves of the time of a group of units over its number of kept units: as text, page and picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from compressor.measure.costs import CostTable
from compressor.report import formatting, plot
from compressor.report.html import environment
from compressor.report.plot import Axis, Plot

_BAR, _EIGHTHS = 24, " ▏▎▍▌▋▊▉█"  # characters of the longest bar, and one that is filled to each eighth
_TYPES = {"heads": ("attention", "attentions"), "neurons": ("feed-forward", "feed-forwards")}


class CostPoint(NamedTuple):
    """A number of units that was timed: the time that it adds to a call, and the share of all groups of the model.

    At a cliff, `faster` is the next larger number of units, which takes less time; else it is None.
    """

    units: int
    ms: float
    share: float
    faster: int | None = None


class CostCurve(NamedTuple):
    """Groups of equal cost: `5 attentions`, the type of their units, and their names with `*` where these differ.

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
    return f"{text}; dense takes {dense}, and without units {least}: at most {limit:.3g}× as fast as dense"


def render(model: str, engine: str, tables: Sequence[CostTable]) -> str:
    """The page: for each size a figure for each class of equal groups, and the numbers as a table."""
    sections, tiles = [], []
    for table in tables:
        curves = [(curve, plot.inline(_plot(curve)), curve_rows(curve)) for curve in curves_of(table)]
        sections.append({"label": table.size_label, "headline": headline(table), "curves": curves})
        limit = f"{table.dense / table.least:.3g}×"
        tiles.append((f"limit, {table.size_label}", limit, f"of dense, {formatting.ms(table.dense)}"))
    page = environment().get_template("cost_page.html")
    return page.render(name=model, engine=engine, sections=sections, tiles=tiles)


def picture(tables: Sequence[CostTable]) -> str:
    """An SVG with a row of panels for each size, a panel for each class of equal groups."""
    rows = [[_plot(curve, f"{curve.title}, {table.size_label}") for curve in curves_of(table)] for table in tables]
    return plot.picture(rows)


def _plot(curve: CostCurve, title: str = "") -> Plot:
    """The time of one group against its units, with cliffs as hollow marks."""
    units, times = [point.units for point in curve.points], [point.ms for point in curve.points]
    x = Axis.of(units, f"{curve.unit} kept", margin=0.03, whole=True)
    y = Axis.of((0.0, *times), "milliseconds", margin=0.1, most=5, has_grid=True)
    panel = Plot(x, y, 173, title=title)
    points = list(zip(units, times, strict=True))
    panel.line(points, plot.COMPRESSED)
    panel.marks(points, plot.COMPRESSED, 3.5)
    panel.marks(
        [(point.units, point.ms) for point in curve.points if point.faster is not None], plot.BAD, 8, is_filled=False
    )
    return panel
