"""The figures of the studies, in the style of the report's figures, and their SVG. Their text never comes from rows."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, NullLocator

# Placeholders for the page's colours, which differ between light, dark and print.
DENSE, COMPRESSED, INK, LINE, MUTED = "#010101", "#020202", "#030303", "#040404", "#050505"
_ON_PAGE = {
    DENSE: "var(--dense)",
    COMPRESSED: "var(--compressed)",
    INK: "var(--ink)",
    LINE: "var(--line)",
    MUTED: "var(--muted)",
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "compressor",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.color": LINE,
    "ytick.labelcolor": MUTED,
    "axes.labelcolor": MUTED,
    "ytick.major.size": 0,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
}
_HALF, _WIDE = 4.4, 9.2
"""Widths in inches: two figures side by side on a page, or one that fills it."""
_COLOURS = (
    "#0b7a75",
    "#d1711f",
    "#5b6fd6",
    "#c23b6b",
    "#8a9a1f",
    "#7d4fb3",
    "#b5892e",
    "#3a93c4",
    "#a0522d",
    "#6b7280",
)
Points = Sequence[tuple[float, Sequence[float]]]
"""(x, values at x), values of several seeds."""


def lines_with_ranges(
    lines: Mapping[str, Points],
    x_label: str,
    y_label: str,
    *,
    level: tuple[str, Sequence[float]] | None = None,
    log: bool = False,
    wide: bool = True,
) -> Figure:
    """One line per name: the mean of the values at each x, and a band from their minimum to their maximum.

    Args:
        lines: name -> points.
        x_label: label of the x axis.
        y_label: label of the y axis.
        level: name and values of a horizontal line and band, for comparison.
        log: whether the x axis is logarithmic, with a tick at each x.
        wide: whether the figure fills the width of the page, instead of half of it.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(wide, 3.6 if wide else 2.6)
        if level:
            name, values = level
            axes.axhline(float(np.mean(values)), color=DENSE, linewidth=1.4, linestyle="--", label=name)
            if len(values) > 1:
                axes.axhspan(min(values), max(values), color=DENSE, alpha=0.18, linewidth=0)
        ticks: set[float] = set()
        for (name, points), colour in zip(lines.items(), _cycle(len(lines)), strict=True):
            ordered = sorted(points, key=lambda point: point[0])
            xs = [x for x, _ in ordered]
            ticks.update(xs)
            axes.plot(xs, [np.mean(ys) for _, ys in ordered], color=colour, linewidth=1.6, marker="o", ms=4, label=name)
            low, high = [min(ys) for _, ys in ordered], [max(ys) for _, ys in ordered]
            if low != high:
                axes.fill_between(xs, low, high, color=colour, alpha=0.14, linewidth=0)
        if log and min(ticks, default=0) > 0:
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
        if log:
            axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
        _named(axes, x_label, y_label)
        if len(lines) + bool(level) > 1:
            _legend(figure, axes)
        return figure


def curves(panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float]]]]], x_label: str) -> Figure:
    """Panels side by side, one line of (x, y) per name; logarithmic where a panel spans three decades or more."""
    with matplotlib.rc_context(STYLE):
        figure = Figure((_WIDE, 2.9), layout=ConstrainedLayoutEngine(w_pad=0.12))
        names = list(dict.fromkeys(name for _, lines in panels for name in lines))
        colours = dict(zip(names, _cycle(len(names)), strict=True))
        for index, (y_label, lines) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), index + 1)
            for name, line in lines.items():
                few = "o" if len(line) <= 12 else None
                axes.plot(*zip(*line, strict=True), color=colours[name], linewidth=1.4, marker=few, ms=3, label=name)
            values = [y for line in lines.values() for _, y in line]
            if values and min(values) > 0 and max(values) / min(values) >= 1000:
                axes.set_yscale("log")
                axes.yaxis.set_minor_locator(NullLocator())
            _named(axes, x_label, y_label)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if len(names) > 1:
            _legend(figure, figure.axes[0])
        return figure


def maps(
    panels: Sequence[tuple[str, np.ndarray]],
    *,
    low: float | None = None,
    high: float | None = None,
    diverging: bool = False,
    marks: np.ndarray | None = None,
) -> Figure:
    """Maps `[sites, heads]` side by side on one scale; NaN is blank.

    Args:
        panels: title and values `[sites, heads]` of each map.
        low: lower end of the scale; None: the smallest value.
        high: upper end of the scale; None: the largest value.
        diverging: whether the scale is symmetric around zero.
        marks: heads that get a dot, `[sites, heads]`; None: none.
    """
    with matplotlib.rc_context(STYLE):
        sites, heads = panels[0][1].shape
        columns = min(len(panels), 3 if heads <= 16 else 2)
        rows = math.ceil(len(panels) / columns)
        width = _WIDE if len(panels) > 1 else _HALF
        each = (width - 0.9) / columns
        figure = Figure((width, rows * (each * min(sites / heads, 1.6) + 0.55)), layout="constrained")
        all_values = np.concatenate([values.ravel() for _, values in panels])
        bottom = float(np.nanmin(all_values)) if low is None else low
        top = float(np.nanmax(all_values)) if high is None else high
        if diverging:
            top = max(abs(bottom), abs(top)) or 1.0
            bottom = -top
        picture: Any = None
        for index, (title, values) in enumerate(panels):
            axes = figure.add_subplot(rows, columns, index + 1)
            picture = axes.pcolormesh(
                np.ma.masked_invalid(values),
                cmap="RdBu" if diverging else "YlGnBu",
                vmin=bottom,
                vmax=top if top > bottom else bottom + 1,
                edgecolors=LINE,
                linewidth=0.4,
            )
            if marks is not None:
                across, down = np.nonzero(marks.T)
                axes.plot(across + 0.5, down + 0.5, "o", color="#1a1d21", markersize=2.6)
            _as_map(axes, sites, heads)
            axes.set_title(title, fontsize=9, color=INK)
        figure.colorbar(picture, ax=figure.axes, shrink=0.8, aspect=24, pad=0.02).outline.set_visible(False)
        return figure


def table_map(values: np.ndarray, columns: Sequence[str], x_label: str, *, places: int = 1, first: int = 0) -> Figure:
    """A map with its values as text.

    Args:
        values: `[rows, columns]`.
        columns: labels of the columns.
        x_label: label of the x axis.
        places: number of decimal places.
        first: number of the first row.
    """
    with matplotlib.rc_context(STYLE):
        rows, count = values.shape
        figure, axes = _axes(False, 0.7 + min(0.3 * rows, 6.0))
        top = float(np.nanmax(values)) or 1.0
        bottom = min(0.0, float(np.nanmin(values)))
        axes.pcolormesh(values, cmap="YlGnBu", vmin=bottom, vmax=top, edgecolors=LINE, linewidth=0.4)
        for row in range(rows):
            for column in range(count):
                value = values[row, column]
                colour = "#ffffff" if value - bottom > 0.6 * (top - bottom) else "#1a1d21"
                axes.text(
                    column + 0.5, row + 0.5, f"{value:.{places}f}", ha="center", va="center", color=colour, size=7
                )
        axes.invert_yaxis()
        axes.set_xticks(np.arange(count) + 0.5, list(columns))
        axes.set_yticks(np.arange(rows) + 0.5, [str(first + row) for row in range(rows)])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(x_label)
        return figure


def histogram(values: Sequence[float], x_label: str, *, line: float | None = None, whole: bool = False) -> Figure:
    """A histogram of values.

    Args:
        values: the values.
        x_label: label of the x axis.
        line: a value that a vertical line marks, for comparison.
        whole: whether every integer has its own bar.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(False, 2.3)
        ends = [*values, *([] if line is None else [line])]
        if whole and max(ends) - min(ends) <= 160:
            bins = np.arange(math.floor(min(ends)) - 0.5, math.ceil(max(ends)) + 1.5)
        else:
            bins = np.histogram_bin_edges(values, 24)
        counts, edges = np.histogram(values, bins)
        axes.stairs(counts, edges, fill=True, color=COMPRESSED, linewidth=0)
        if line is not None:
            axes.axvline(line, color=INK, linewidth=1.4)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        _named(axes, x_label, "how many")
        return figure


def scatter(groups: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> Figure:
    """Points (x, y), one colour per name."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(False, 2.9)
        for (name, points), colour in zip(groups.items(), _cycle(len(groups)), strict=True):
            if points:
                axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=4, alpha=0.75, label=name)
        _named(axes, x_label, y_label)
        axes.grid(axis="x")
        if len(groups) > 1:
            _legend(figure, axes)
        return figure


def sorted_costs(costs: Sequence[tuple[float, str]], columns: int, states: Sequence[str]) -> Figure:
    """Costs in ascending order, row by row: a square in the colour of its state, with the cost as text."""
    with matplotlib.rc_context(STYLE):
        rows = math.ceil(len(costs) / columns)
        figure = Figure((_WIDE, 0.5 + 0.34 * rows), layout="constrained")
        axes = figure.add_subplot()
        colours = dict(zip(states, ("#0b7a75", "#d1711f", "#98a1ae"), strict=False))
        for index, (cost, state) in enumerate(sorted(costs)):
            row, column = divmod(index, columns)
            axes.add_patch(
                matplotlib.patches.Rectangle((column + 0.04, row + 0.06), 0.92, 0.88, color=colours[state], linewidth=0)
            )
            axes.text(column + 0.5, row + 0.5, f"{cost:.2f}", ha="center", va="center", color="#ffffff", size=8)
        for state, colour in colours.items():
            axes.plot([], [], "s", color=colour, label=state)
        axes.set(xlim=(0, columns), ylim=(rows, 0))
        axes.set_axis_off()
        _legend(figure, axes)
        return figure


def attention_maps(panels: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> Figure:
    """Map and mask `[query, key]` of each layer side by side; in long maps a dot is the mean of several positions."""
    with matplotlib.rc_context(STYLE):
        columns = min(len(panels), 3)
        rows = math.ceil(len(panels) / columns)
        figure = Figure((_WIDE, rows * (_WIDE / columns / 2 + 0.3)), layout="constrained")
        for index, (title, weights, mask) in enumerate(panels):
            row, column = divmod(index, columns)
            for side, (values, top) in enumerate(((weights, float(np.quantile(weights, 0.99)) or 1.0), (mask, 1.0))):
                axes = figure.add_subplot(rows, 2 * columns, row * 2 * columns + 2 * column + side + 1)
                axes.imshow(_smaller(values), cmap="YlGnBu", vmin=0.0, vmax=top, aspect="auto", interpolation="nearest")
                axes.set_xticks([])
                axes.set_yticks([])
                axes.set_title(title if side == 0 else "mask", fontsize=8, color=INK)
        return figure


def styled(figure: Figure) -> Markup:
    """The figure as an `<svg>` element of a page, which defines its fonts and colours."""
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true" focusable="false">', svg, count=1)
    svg = re.sub(r"font-family: [^;]*; ", "", svg).replace("xlink:href", "href")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    # Hundredths of a pixel are enough inside tags; the text between tags has the numbers that people read.
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), re.sub(r"\s+", " ", svg))
    # Ids are shared by the whole page, so two figures must not define the same clip path.
    prefix = hashlib.sha256(svg.encode()).hexdigest()[:8]
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for sentinel, colour in _ON_PAGE.items():
        svg = svg.replace(sentinel, colour)
    return Markup(svg)


def _axes(wide: bool, height: float) -> tuple[Figure, Axes]:
    figure = Figure((_WIDE if wide else _HALF, height), layout="constrained")
    return figure, figure.add_subplot()


def _as_map(axes: Axes, sites: int, heads: int) -> None:
    axes.invert_yaxis()
    every = 1 if heads <= 16 else 4
    axes.set_xticks(np.arange(0, heads, every) + 0.5, [str(head) for head in range(0, heads, every)])
    step = 1 if sites <= 16 else 4
    axes.set_yticks(np.arange(0, sites, step) + 0.5, [str(site) for site in range(0, sites, step)])
    axes.tick_params(length=0, labelsize=7)
    axes.spines[:].set_visible(False)
    axes.set_aspect("equal" if max(sites, heads) <= 3 * min(sites, heads) else "auto")


def _named(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 6 if figure.get_figwidth() > _HALF else 3),
        frameon=False,
        labelcolor=MUTED,
    )


def _cycle(count: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]


def _smaller(values: np.ndarray, most: int = 128) -> np.ndarray:
    """Averages neighbours until there are at most `most` values along each axis."""
    for axis in (0, 1):
        starts = np.unique(np.linspace(0, values.shape[axis], min(most, values.shape[axis]) + 1).astype(int)[:-1])
        counts = np.diff(np.append(starts, values.shape[axis]))
        shape = [1, 1]
        shape[axis] = -1
        values = np.add.reduceat(values, starts, axis=axis) / counts.reshape(shape)
    return values
