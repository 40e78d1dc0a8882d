"""Plot the checks of a history."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compressor.latency.verdict import Slowdown, Verdict
from compressor.results.times import size_label
from graph_passes.files import atomic_replace

_MAX_CHECKS, _MAX_TICKS = 100, 8


def comparable(checks: Sequence[Verdict], last: Verdict) -> list[Verdict]:
    """The timed checks of the same models, at the same sizes and on the same host and machine as `last`."""
    return [check for check in checks if check.slowdown is not None and check.comparison == last.comparison]


def plot_history(checks: Sequence[Verdict], last: Verdict, path: Path) -> None:
    """Plot the median times and the slowdowns of the checks that are comparable with `last`.

    Args:
        checks: a history.
        last: the latest check.
        path: `.svg` or `.png` file to write.
    """
    timed = comparable(checks, last)[-_MAX_CHECKS:]
    slowdowns = [check.slowdown for check in timed if check.slowdown is not None]
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.set_title(f"{last.title}, {size_label(last.batch, last.seq)}", fontsize=9, parse_math=False)
    _plot_medians(upper, slowdowns)
    _plot_slowdowns(lower, slowdowns)
    labels = [check.time[:16].replace("T", "\n") for check in timed]
    lower.xaxis.set_major_locator(MaxNLocator(_MAX_TICKS, integer=True))
    lower.xaxis.set_major_formatter(lambda x, _: labels[int(x)] if x in range(len(labels)) else "")
    lower.tick_params(axis="x", labelsize=7)
    with atomic_replace(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower())


def _plot_medians(axes: Axes, slowdowns: Sequence[Slowdown]) -> None:
    x = range(len(slowdowns))
    axes.plot(x, [slowdown.model_p50 for slowdown in slowdowns], "o-", label="model")
    axes.plot(x, [slowdown.baseline_p50 for slowdown in slowdowns], "o-", label="baseline", color="0.6")
    axes.set_ylabel("p50, ms")
    axes.set_ylim(0, 1.1 * max((max(slowdown.model_p50, slowdown.baseline_p50) for slowdown in slowdowns), default=1.0))
    axes.legend(frameon=False)


def _plot_slowdowns(axes: Axes, slowdowns: Sequence[Slowdown]) -> None:
    x = range(len(slowdowns))
    percent = 100 * np.array([(each.slowdown, each.low, each.high, each.limit) for each in slowdowns]).reshape(-1, 4)
    middle, low, high, limit = percent.T
    axes.errorbar(x, middle, yerr=np.maximum([middle - low, high - middle], 0), fmt="none", ecolor="0.6", capsize=3)
    axes.scatter(x, middle, c=["tab:green" if each.holds else "tab:red" for each in slowdowns], zorder=3)
    axes.step(x, limit, where="mid", color="tab:red", linewidth=1, linestyle="--")
    axes.axhline(0, color="0.8", linewidth=1, zorder=0)
    axes.set_ylabel("slowdown, % (95%)")
