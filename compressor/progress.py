"""How commands report stages, progress and notes, e.g. to a terminal, and the record of a run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from compressor.environment import release_memory

if TYPE_CHECKING:
    from compressor.results import Note

T = TypeVar("T")
ProgressCallback = Callable[[int, int], None]
"""Called with (steps finished, steps in total)."""


def ignore_progress(finished: int, total: int) -> None:
    """A callback that does nothing."""


def tracked(items: Collection[T], on_progress: ProgressCallback) -> Iterator[T]:
    """The items, of which the number that are finished is reported before each, and after the last."""
    for number, item in enumerate(items):
        on_progress(number, len(items))
        yield item
    on_progress(len(items), len(items))


class Listener(Protocol):
    """Receives the stages and notes of a command. No result depends on it."""

    def stage(self, name: str) -> AbstractContextManager[ProgressCallback]:
        """Begin a stage, which ends with the context; yields the callback for its progress."""
        ...

    def note(self, note: Note) -> None:
        """Receive a note, which a reader of the results must know."""
        ...


class NullListener:
    """Ignores stages and notes."""

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        yield ignore_progress

    def note(self, note: Note) -> None:
        pass


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
        release_memory()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)

    def add_notes(self, notes: Iterable[Note]) -> None:
        """Add notes, but for those that were added already."""
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                self._listener.note(note)

    def without_notes(self) -> RunLog:
        """A log with the same stages, whose notes are its own and do not reach the listener."""
        silent = copy.copy(self)
        silent.notes, silent._listener = [], _Stages(self._listener)
        return silent

    def separate(self) -> RunLog:
        """A log without notes whose times are its own too."""
        log = self.without_notes()
        log.seconds = {}
        return log

    def later(self) -> RunLog:
        """A log that begins with the notes so far, and whose times are its own."""
        log = copy.copy(self)
        log.notes, log.seconds, log.start = [*self.notes], {}, time.perf_counter()
        return log


class _Stages:
    """Passes stages on to another listener, and drops notes."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def stage(self, name: str) -> AbstractContextManager[ProgressCallback]:
        return self._listener.stage(name)

    def note(self, note: Note) -> None:
        pass
