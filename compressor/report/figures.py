"""The figures of the page as inline SVG, a function for each; the page defines their colours.

Figures contain numbers and no strings of a report, so that no name is read as markup.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from compressor.report import formatting
from compressor.results import Speed

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
_WIDTH = 4.4  # inches of 72 pixels: two fit side by side on a desktop, one fills the width of a phone


def curve(steps: Sequence[int], values: Sequence[float]) -> Markup:
    """A logged quantity over the steps, on a logarithmic axis if it spans three decades or more."""
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes(2.1)
        axes.plot(steps, values, color=COMPRESSED, linewidth=1.4, marker="o" if len(steps) <= 25 else None, ms=3.5)
        if min(values) > 0 and max(values) / min(values) >= 1000:
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("step")
        axes.grid(axis="y")
        return inline(figure)


def latencies(speed: Speed) -> Markup:
    """Histograms of both engines' calls on one axis from zero, with p50, p90 and p99 marked."""
    end = axis_end(speed)
    bins = np.linspace(0, end, 81)
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes(2.1)
        for base, engine, colour in ((1.0, speed.dense, DENSE), (0.0, speed.compressed, COMPRESSED)):
            shares, _ = np.histogram(engine.samples, bins)
            height = 0.6 * shares / max(shares.max(), 1)  # below the label of p50
            axes.stairs(base + height, bins, baseline=base, fill=True, color=colour, linewidth=0)
            for value, drop in ((engine.p50, 0.8), (engine.p90, 0.0), (engine.p99, 0.0)):
                axes.plot((value, value), (base - 0.1, base + drop), color=INK, linewidth=1.2 if drop else 0.9)
            label, mark = formatting.ms(engine.p50), (engine.p50, base + 0.8)
            axes.annotate(label, mark, (3, 0), textcoords="offset points", color=INK, va="top")
        axes.set_yticks([1.0, 0.0], ["dense", "compressed"], va="bottom")
        axes.set(xlim=(0, end), ylim=(-0.16, 1.95), xlabel="milliseconds per call")
        return inline(figure)


def axis_end(speed: Speed) -> float:
    """The end of the latencies' axis, in milliseconds: above both p99; the page counts the few calls above it."""
    return 1.15 * max(speed.dense.p99, speed.compressed.p99, 1e-9)


def ratios(speeds: Sequence[Speed]) -> Markup:
    """Speed relative to dense with its interval, a line for each size; void rows are hollow and grey."""
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes(0.75 + 0.3 * len(speeds))
        rows = range(len(speeds), 0, -1)
        for row, speed in zip(rows, speeds, strict=True):
            colour = COMPRESSED if speed.void is None else MUTED
            axes.plot((speed.low, speed.high), (row, row), color=colour, linewidth=2)
            axes.plot(speed.ratio, row, "o", color=colour, markersize=6, fillstyle="none" if speed.void else "full")
        axes.axvline(1, color=INK, linewidth=1)
        ends = [1.0, *(end for speed in speeds for end in (speed.low, speed.high, speed.ratio) if math.isfinite(end))]
        margin = 0.06 * (max(ends) - min(ends)) or 0.1
        axes.set(xlim=(min(ends) - margin, max(ends) + margin), ylim=(0.4, len(speeds) + 0.6))
        axes.set_yticks(list(rows), [speed.size_label for speed in speeds])
        # The font of a page is wider than that of the layout: few labels leave room at the ends.
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.set_xlabel("times the speed of dense")
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        return inline(figure)


def new_axes(height: float) -> tuple[Figure, Axes]:
    """A figure of the width of the page's figures, and its axes."""
    figure = Figure((_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def inline(figure: Figure) -> Markup:
    """The figure as an `<svg>` element of a page, which defines its fonts and colours."""
    text = io.StringIO()
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
