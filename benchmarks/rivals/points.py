"""The rows of the table as points that the page of a ladder shows (`compress --compare-points`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.rivals.measure import BATCH
from benchmarks.rivals.rows import RIVALS
from benchmarks.text_sets import SETS


def points_of(name: str, rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A point for each row and batch size that was timed, with milliseconds: a ladder may have another dense engine.

    Args:
        name: key of `SETS`.
        rows: row -> its numbers; those that failed have no points.
    """
    return [point for row, numbers in rows.items() if "failed" not in numbers for point in _points(name, row, numbers)]


def _points(name: str, row: str, numbers: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The points of a row: its times have the range over the processes that timed it, its metric the 95% interval."""
    dense = numbers["metric"] - numbers["difference"]
    ends = dense + numbers["low"], dense + numbers["high"]
    for batch in (1, BATCH):
        times = [timing[f"p50-{batch}"] for timing in numbers["timings"]]
        if times:
            yield {
                "name": RIVALS[row].title,
                "metric": numbers["metric"],
                "metric_interval": [min(*ends, numbers["metric"]), max(*ends, numbers["metric"])],
                "p50": float(np.median(times)),
                "p50_interval": [min(times), max(times)],
                "batch": batch,
                "seq": SETS[name].max_length,
            }
