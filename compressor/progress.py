"""The interface by which commands report stages, progress and notes, e.g. to a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from compressor.results import Note

ProgressCallback = Callable[[int, int], None]
"""Called with (steps finished, steps in total)."""


def ignore_progress(finished: int, total: int) -> None:
    """A callback that does nothing."""


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
