"""The figures of the page of a report, a function for each. They contain numbers and no strings of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from compressor.report import formatting
from compressor.report.plot import COMPRESSED, DENSE, INK, MUTED, Axis, Plot, inline, stairs
from compressor.results import Speed

_HEIGHT = 150.0  # pixels


def curve(steps: Sequence[int], values: Sequence[float]) -> Markup:
    """A logged quantity over the steps, on a logarithmic axis if it spans three decades or more."""
    is_log = min(values) > 0 and max(values) / min(values) >= 1000
    plot = Plot(Axis.of(steps, "step", whole=True), Axis.of(values, has_grid=True, is_log=is_log), _HEIGHT)
    points = list(zip(steps, values, strict=True))
    plot.line(points, COMPRESSED)
    if len(points) <= 25:
        plot.marks(points, COMPRESSED, 3.5)
    return inline(plot)


def latencies(speed: Speed) -> Markup:
    """Histograms of both engines' calls on one axis from zero, with p50, p90 and p99 marked."""
    end = axis_end(speed)
    bins = np.linspace(0, end, 81)
    rows = Axis(-0.16, 1.95, "", {1.1: "dense", 0.1: "compressed"})
    plot = Plot(Axis.of((0, end), "milliseconds per call", margin=0), rows, _HEIGHT)
    for base, engine, colour in ((1.0, speed.dense, DENSE), (0.0, speed.compressed, COMPRESSED)):
        shares, _ = np.histogram(engine.samples, bins)
        heights = 0.6 * shares / max(shares.max(), 1)  # below the label of p50
        plot.area(stairs(heights.tolist(), bins.tolist(), base), colour)
        for value, rise in ((engine.p50, 0.8), (engine.p90, 0.0), (engine.p99, 0.0)):
            plot.line(((value, base - 0.1), (value, base + rise)), INK, 1.2 if rise else 0.9)
        plot.text((engine.p50, base + 0.8), formatting.ms(engine.p50), INK, (3, 7))
    return inline(plot)


def axis_end(speed: Speed) -> float:
    """The end of the latencies' axis, in milliseconds: above both p99; the page counts the few calls above it."""
    return 1.15 * max(speed.dense.p99, speed.compressed.p99, 1e-9)


def ratios(speeds: Sequence[Speed]) -> Markup:
    """Speed relative to dense with its interval, a line for each size; void rows are hollow and grey."""
    rows = dict(zip(range(len(speeds), 0, -1), speeds, strict=True))
    ends = [1.0, *(end for speed in speeds for end in (speed.low, speed.high, speed.ratio) if math.isfinite(end))]
    x = Axis.of(ends, "times the speed of dense", most=7, margin=0.06, has_grid=True)
    y = Axis(0.4, len(speeds) + 0.6, "", {row: speed.size_label for row, speed in rows.items()})
    plot = Plot(x, y, 54 + 22 * len(speeds))
    plot.line(((1, y.low), (1, y.high)), INK, 1)
    for row, speed in rows.items():
        colour = COMPRESSED if speed.void is None else MUTED
        plot.line(((speed.low, row), (speed.high, row)), colour, 2)
        plot.marks([(speed.ratio, row)], colour, 6, is_filled=not speed.void)
    return inline(plot)
