"""The log of a run: how long each stage took, and the notes for the readers of the report."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from compressor.progress import Listener, ProgressCallback
from compressor.results import Note


class RunLog:
    """Reports stages and notes to a listener, and records them.

    Attributes:
        seconds: wall time of each stage, in seconds; that of a stage that runs several times is summed up.
        notes: notes in the order in which they were added.
        start: when the log was opened, by `time.perf_counter`.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.notes: list[Note] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        """Time a stage; the context's value is the callback for its progress."""
        start = time.perf_counter()
        with self._listener.stage(name) as on_progress:
            yield on_progress
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)

    def add_notes(self, notes: Iterable[Note]) -> None:
        """Add the notes of a product, but for those that were added already."""
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                self._listener.note(note)

    def without_notes(self) -> RunLog:
        """A log with the same stages, whose notes are its own and do not reach the listener."""
        silent = copy.copy(self)
        silent.notes, silent._listener = [], _Stages(self._listener)
        return silent


class _Stages:
    """Passes stages on to another listener, and drops notes."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def stage(self, name: str) -> AbstractContextManager[ProgressCallback]:
        return self._listener.stage(name)

    def note(self, note: Note) -> None:
        pass
