"""The figure of attention maps and their masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from compressor.report.figures import INK, STYLE

_WIDTH = 9.2
"""Width in inches, which fills a page."""


def attention_figure(panels: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> Figure:
    """Map and mask `[query, key]` of each layer side by side; in long maps a dot is the mean of several positions."""
    with matplotlib.rc_context(STYLE):
        columns = min(len(panels), 3)
        rows = math.ceil(len(panels) / columns)
        figure = Figure((_WIDTH, rows * (_WIDTH / columns / 2 + 0.3)), layout="constrained")
        for index, (title, weights, mask) in enumerate(panels):
            row, column = divmod(index, columns)
            for side, (values, top) in enumerate(((weights, float(np.quantile(weights, 0.99)) or 1.0), (mask, 1.0))):
                axes = figure.add_subplot(rows, 2 * columns, row * 2 * columns + 2 * column + side + 1)
                axes.imshow(_smaller(values), cmap="YlGnBu", vmin=0.0, vmax=top, aspect="auto", interpolation="nearest")
                axes.set_xticks([])
                axes.set_yticks([])
                axes.set_title(title if side == 0 else "mask", fontsize=8, color=INK)
        return figure


def _smaller(values: np.ndarray, most: int = 128) -> np.ndarray:
    """Averages neighbours until there are at most `most` values along each axis."""
    for axis in (0, 1):
        starts = np.unique(np.linspace(0, values.shape[axis], min(most, values.shape[axis]) + 1).astype(int)[:-1])
        counts = np.diff(np.append(starts, values.shape[axis]))
        shape = [1, 1]
        shape[axis] = -1
        values = np.add.reduceat(values, starts, axis=axis) / counts.reshape(shape)
    return values
