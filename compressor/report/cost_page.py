"""The curves of cost tables as a self-contained page, or as one picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compressor.measure.costs import CostTable
from compressor.report import formatting
from compressor.report.cost_curves import CostCurve, curve_rows, curves_of, headline
from compressor.report.figures import COMPRESSED, INK, LINE, MUTED, STYLE, inline
from compressor.report.templates import environment

_WIDTH, _HEIGHT = 4.4, 2.4  # inches of one panel
_IN_FILES = {COMPRESSED: "#0b7a75", INK: "#b3261e", LINE: "#dcdfe4", MUTED: "#59616c"}
"""Colours of a picture in a file, in place of those that a page defines."""
_PAGE_COLOURS = {colour: colour for colour in _IN_FILES}


def render(model: str, engine: str, tables: Sequence[CostTable]) -> str:
    """The page: for each size a figure for each class of equal groups, and the numbers as a table."""
    sections = [
        {
            "label": table.size_label,
            "headline": headline(table),
            "curves": [(curve, _svg(curve), curve_rows(curve)) for curve in curves_of(table)],
        }
        for table in tables
    ]
    page = environment().get_template("cost_page.html")
    return page.render(name=model, engine=engine, sections=sections, tiles=list(map(_tile, tables)))


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


def _tile(table: CostTable) -> tuple[str, str, str]:
    return f"limit, {table.size_label}", f"{table.dense / table.least:.3g}×", f"of dense, {formatting.ms(table.dense)}"


def _svg(curve: CostCurve) -> Markup:
    with matplotlib.rc_context(STYLE):
        figure = Figure((_WIDTH, _HEIGHT), layout="constrained")
        _draw(figure.add_subplot(), curve, _PAGE_COLOURS)
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
