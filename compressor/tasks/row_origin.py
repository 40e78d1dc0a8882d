"""The origin of rows: the file of each, and its number there, for error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from datasets import Dataset

from compressor.errors import RowError


@dataclass(frozen=True)
class RowOrigin:
    """The files of rows, and how the rows were selected from them.

    Attributes:
        files: the files in order, each with its number of rows; empty for rows of a data set.
        selections: functions that return the indices selected among the rows of the previous selection; they are called
            only when a row is located.
    """

    files: Sequence[tuple[Path, int]] = ()
    selections: tuple[Callable[[], np.ndarray], ...] = ()

    def select(self, indices: Callable[[], np.ndarray]) -> RowOrigin:
        """The origin of the rows with these indices."""
        return replace(self, selections=(*self.selections, indices))

    def locate(self, indices: np.ndarray) -> tuple[Sequence[Path | None], np.ndarray]:
        """The files of rows with some indices, None for a data set, and their numbers there, counted from 1."""
        for selection in reversed(self.selections):
            indices = selection()[indices]
        if not self.files:
            return [None] * len(indices), indices + 1
        paths, counts = zip(*self.files, strict=True)
        ends = np.cumsum(counts)
        numbers = np.searchsorted(ends, indices, side="right")
        return [paths[number] for number in numbers], indices - (ends - counts)[numbers] + 1

    @contextmanager
    def located(self) -> Iterator[None]:
        """Inside, an error of one of these rows names its file and its number there."""
        try:
            yield
        except RowError as error:
            (file,), (row,) = self.locate(np.array([error.details["row"] - 1]))
            raise error.at(file, int(row)) from error


class SplitRows(dict[str, Dataset]):
    """Rows by the name of their split.

    Attributes:
        origins: the origin of the rows of each split.

    Args:
        rows: the rows.
        origins: the origin of each split; rows of a data set have none.
    """

    def __init__(self, rows: Mapping[str, Dataset], origins: Mapping[str, RowOrigin] | None = None) -> None:
        super().__init__(rows)
        self.origins = dict.fromkeys(rows, RowOrigin()) | dict(origins or {})
