"""A file of evaluated subsets: an interrupted search resumes from it, and searches on the same model share it."""

from __future__ import annotations

import contextlib
import itertools
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compressor.selection.search import Head
from graph_passes.files import atomic_replace


class Evaluation(NamedTuple):
    """The evaluation of one subset of heads.

    Attributes:
        statistics: `Task.per_example` of every evaluation row, `[examples, k]`.
        forwards: cost, in forwards of the whole model over all evaluation rows; subsets that were measured together
            share their cost equally.
    """

    statistics: np.ndarray
    forwards: float


Evaluations = dict[frozenset[Head], Evaluation]
"""Evaluations by the heads that are kept."""


class EvaluationStore:
    """Evaluations in an `.npz` file, which is written at intervals, longer ones if a write takes long.

    Args:
        path: the file; it need not exist.
        heads: all heads, in (site, head) order.
        rows: number of evaluation rows.
        seconds: minimum time between two writes.
        write_share: minimum time between two writes, as a multiple of the time that a write takes.
    """

    def __init__(
        self, path: Path, heads: tuple[Head, ...], rows: int, *, seconds: float = 30.0, write_share: float = 20.0
    ) -> None:
        self._path, self._heads, self._rows = path, heads, rows
        self._seconds, self._write_share = seconds, write_share
        self._next_write = time.monotonic() + seconds

    def load(self) -> Evaluations:
        """The evaluations in the file; empty if it is missing, damaged, or of other heads or rows."""
        with (
            contextlib.suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile),
            np.load(self._path) as file,
        ):
            kept, statistics, forwards = file["kept"], file["statistics"], file["forwards"]
            fits = kept.shape[1:] == (len(self._heads),) and statistics.shape[1:2] == (self._rows,)
            if fits and len(kept) == len(statistics) == len(forwards):
                subsets = (frozenset(itertools.compress(self._heads, mask)) for mask in kept)
                return dict(zip(subsets, map(Evaluation, statistics, forwards.tolist()), strict=True))
        return {}

    def exchange(self, evaluations: Evaluations) -> None:
        """If the interval has passed, add evaluations that other processes wrote to `evaluations`, and write all."""
        if time.monotonic() >= self._next_write:
            self.write(evaluations)

    def write(self, evaluations: Evaluations) -> None:
        """Add evaluations that other processes wrote to `evaluations`, and write all; nothing if there are none."""
        start = time.monotonic()
        evaluations.update(self.load())
        if not evaluations:
            return
        kept = np.array([[head in subset for head in self._heads] for subset in evaluations])
        statistics, forwards = zip(*evaluations.values(), strict=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(self._path) as partial, partial.open("wb") as file:
            np.savez(file, kept=kept, statistics=np.stack(statistics), forwards=np.array(forwards))
        now = time.monotonic()
        self._next_write = now + max(self._seconds, self._write_share * (now - start))
