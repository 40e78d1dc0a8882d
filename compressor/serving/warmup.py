"""Warm-up requests, which the server runs before it reports ready: real texts, alone and in the largest batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compressor.targets import Feeds

FOLDER = "warmup"
"""Folder in which Triton looks for the files that a configuration names."""


@dataclass(frozen=True)
class Warmup:
    """One warm-up request.

    Attributes:
        row: number of the row.
        batch: number of times that the server repeats the row in one batch.
        feeds: input name -> array `[batch, ...]` of the row.
    """

    row: int
    batch: int
    feeds: Feeds

    @property
    def name(self) -> str:
        """Name of the request in the server's log."""
        return f"row {self.row}, batch {self.batch}"

    @property
    def files(self) -> Mapping[str, str]:
        """File name of each input."""
        return {name: f"row{self.row}.{index}" for index, name in enumerate(self.feeds)}

    def write(self, folder: Path) -> None:
        """Write the inputs as the server reads them: raw bytes, row by row."""
        for name, file in self.files.items():
            (folder / file).write_bytes(np.ascontiguousarray(self.feeds[name]).tobytes())


def warmups(rows: Sequence[Feeds], max_batch: int) -> tuple[Warmup, ...]:
    """The shortest and the longest row, each alone and, where the server forms batches, as the largest batch."""
    by_size = {sum(array.size for array in row.values()): row for row in reversed(rows)}
    extremes = [by_size[size] for size in sorted({min(by_size), max(by_size)})]
    return tuple(
        Warmup(index, batch, row) for index, row in enumerate(extremes) for batch in sorted({1, max_batch or 1})
    )
