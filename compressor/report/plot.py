"""Plots as SVG: axes with round ticks, and lines, marks, areas and texts on them.

A page defines the colours of its plots (`inline`); a picture in a file carries its own (`picture`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

DENSE, COMPRESSED, INK, LINE, MUTED, BAD = (
    f"var(--{name})" for name in ("dense", "compressed", "ink", "line", "muted", "bad")
)
"""Colours of a page, which differ between light, dark and print."""
_IN_FILES = {
    "dense": "#98a1ae",
    "compressed": "#0b7a75",
    "ink": "#1a1d21",
    "line": "#dcdfe4",
    "muted": "#59616c",
    "bad": "#b3261e",
}
"""The light colours of a page, for a picture in a file."""
WIDTH = 317.0
"""Width of a plot in pixels: two fit side by side on a desktop, one fills the width of a phone."""
_FONT, _LETTER = 9, 5.2  # pixels: the size of the font, and the mean width of its letters
_GAP = 4.0  # pixels between an axis, its labels and the ends of the plot

Points = Iterable[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`: its name, and the labels of its ticks."""

    low: float
    high: float
    name: str
    ticks: Mapping[float, str]
    has_grid: bool = False
    is_log: bool = False

    @classmethod
    def of(
        cls,
        values: Iterable[float],
        name: str = "",
        *,
        most: int = 6,
        margin: float = 0.05,
        whole: bool = False,
        has_grid: bool = False,
        is_log: bool = False,
    ) -> Axis:
        """The axis of the finite values, with ticks at round numbers.

        Args:
            most: the largest number of ticks.
            margin: room beyond the least and the largest value, as a share of what they span.
            whole: whether ticks are whole numbers.
            is_log: whether the axis is logarithmic, with ticks at powers of ten; every value is positive then.
        """
        finite = [float(value) for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = (math.log10(end) if is_log else end for end in (min(finite), max(finite)))
        room = margin * (high - low) or 0.05 * abs(high) or 0.05
        low, high = low - room, high + room
        ticks = round_numbers(low, high, most, whole=whole or is_log)
        if is_log:
            low, high, ticks = 10**low, 10**high, [10**tick for tick in ticks]
        labels = {tick: f"{tick:g}".replace("-", "−") for tick in ticks}
        return cls(low, high, name, labels, has_grid, is_log)

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end."""
        low, high, value = (math.log10(end) if self.is_log else end for end in (self.low, self.high, value))
        return (value - low) / (high - low)


def round_numbers(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """At most `most` equally distant numbers from `low` to `high`, whose distance is 1, 2 or 5 times a power of ten.

    The distance is 4 times a power of ten if 2 gives too many numbers and 5 only one.
    """
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    steps = [factor * power for factor in (1, 2, 5, 10, 20, 4, 40) if not whole or factor * power >= 1]
    ranges = [(math.ceil(low / step), math.floor(high / step), step) for step in steps]
    few = [(first, last, step) for first, last, step in ranges if last - first < most]
    several = (part for part in few if part[0] < part[1])
    first, last, step = next(several, few[0] if few else (math.ceil(low), math.floor(high), 1.0))
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


class Plot:
    """Axes, and the marks on them; all texts are escaped, and points that are not finite are left out."""

    def __init__(self, x: Axis, y: Axis, height: float, *, width: float = WIDTH, title: str = "") -> None:
        self._x, self._y = x, y
        self.width, self.height = width, height
        line = _FONT + _GAP
        letters = max(map(len, y.ticks.values()), default=0)
        self._left = _GAP + _LETTER * letters + _GAP + line * bool(y.name)
        self._right = width - 2 * _GAP
        self._top = _GAP + line * bool(title)
        self._bottom = height - line - _GAP - line * bool(x.name)
        self._parts: list[str] = []
        self._draw_axes(title)

    def line(self, points: Points, colour: str, width: float = 1.4, *, dashes: str = "none") -> None:
        """Join points by a line."""
        style = f"fill: none; stroke: {colour}; stroke-width: {width}; stroke-dasharray: {dashes}"
        self._parts.append(f'<polyline points="{self._path(points)}" style="{style}"/>')

    def area(self, points: Points, colour: str) -> None:
        """Fill the area within points."""
        self._parts.append(f'<polygon points="{self._path(points)}" style="fill: {colour}"/>')

    def marks(
        self, points: Points, colour: str, size: float, *, is_filled: bool = True, is_diamond: bool = False
    ) -> None:
        """A circle or a diamond of `size` pixels at each point, filled or hollow."""
        half = size / 2
        style = f"fill: {colour if is_filled else 'none'}; stroke: {colour}"
        for x, y in self._pixels(points):
            turn = f' transform="rotate(45 {x:.2f} {y:.2f})"' if is_diamond else ""
            radius = "" if is_diamond else f' rx="{half:g}"'
            box = f'x="{x - half:.2f}" y="{y - half:.2f}" width="{size:g}" height="{size:g}"'
            self._parts.append(f'<rect {box}{radius}{turn} style="{style}"/>')

    def text(self, point: tuple[float, float], text: str, colour: str, shift: tuple[float, float] = (0, 0)) -> None:
        """A text that begins `shift` pixels to the right of and below a point."""
        for x, y in self._pixels([point]):
            self._write(x + shift[0], y + shift[1], text, colour, "start")

    @property
    def content(self) -> str:
        """The elements of the plot."""
        return "".join(self._parts)

    def _draw_axes(self, title: str) -> None:
        x, y, middle = self._x, self._y, (self._left + self._right) / 2
        for tick, label in x.ticks.items():
            position = self._left + x.share(tick) * (self._right - self._left)
            self._rule((position, self._bottom), (position, self._top if x.has_grid else self._bottom + 3))
            self._write(position, self._bottom + _FONT + _GAP, label, MUTED, "middle")
        for tick, label in y.ticks.items():
            position = self._bottom - y.share(tick) * (self._bottom - self._top)
            if y.has_grid:
                self._rule((self._left, position), (self._right, position))
            self._write(self._left - _GAP, position + _FONT / 3, label, MUTED, "end")
        self._rule((self._left, self._bottom), (self._right, self._bottom))
        self._write(middle, self.height - _GAP, x.name, MUTED, "middle")
        self._write(middle, _FONT + _GAP / 2, title, MUTED, "middle")
        position = (self._top + self._bottom) / 2
        self._write(_FONT, position, y.name, MUTED, "middle", f' transform="rotate(-90 {_FONT} {position:.2f})"')

    def _rule(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in (start, end))
        self._parts.append(f'<polyline points="{points}" style="stroke: {LINE}; stroke-width: 0.7"/>')

    def _write(self, x: float, y: float, text: str, colour: str, anchor: str, further: str = "") -> None:
        if text:
            style = f"fill: {colour}; font-size: {_FONT}px; text-anchor: {anchor}"
            self._parts.append(f'<text x="{x:.2f}" y="{y:.2f}"{further} style="{style}">{escape(text)}</text>')

    def _pixels(self, points: Points) -> Iterable[tuple[float, float]]:
        for x, y in points:
            if math.isfinite(x) and math.isfinite(y):
                across, up = self._x.share(x), self._y.share(y)
                yield self._left + across * (self._right - self._left), self._bottom - up * (self._bottom - self._top)

    def _path(self, points: Points) -> str:
        return " ".join(f"{x:.2f},{y:.2f}" for x, y in self._pixels(points))


def stairs(heights: Sequence[float], ends: Sequence[float], base: float) -> list[tuple[float, float]]:
    """The outline of bars side by side, from `base` up by their heights."""
    across, up = np.repeat(ends, 2), base + np.pad(np.repeat(heights, 2), 1)
    return list(zip(across.tolist(), up.tolist(), strict=True))


def inline(plot: Plot) -> Markup:
    """The plot as an `<svg>` element of a page, which defines its font and colours."""
    size = f'viewBox="0 0 {plot.width:g} {plot.height:g}"'
    return Markup(f'<svg {size} aria-hidden="true" focusable="false">{plot.content}</svg>')


def picture(rows: Sequence[Sequence[Plot]]) -> str:
    """A file with rows of plots of equal size, on white."""
    width, height = rows[0][0].width, rows[0][0].height
    content = "".join(
        f'<g transform="translate({column * width:g} {row * height:g})">{plot.content}</g>'
        for row, plots in enumerate(rows)
        for column, plot in enumerate(plots)
    )
    return file_text(f'<svg viewBox="0 0 {max(map(len, rows)) * width:g} {len(rows) * height:g}">{content}</svg>')


def file_text(svg: str) -> str:
    """An `<svg>` element of a page as a file of its own, on white."""
    text = re.sub(r"var\(--(\w+)\)", lambda name: _IN_FILES[name[1]], svg)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    size = f'width="{box[1]}pt" height="{box[2]}pt" ' if box else ""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}font-family="sans-serif" style="background: #ffffff" '
    return '<?xml version="1.0" encoding="utf-8"?>\n' + text.replace("<svg ", head, 1) + "\n"
