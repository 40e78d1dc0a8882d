"""How a long stage reports its progress, whoever listens: a terminal, a test, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from compressor.results import Note

ProgressCallback = Callable[[int, int], None]
"""Called with (steps finished, steps in all)."""


def ignore_progress(finished: int, total: int) -> None:
    """A callback that does nothing."""


class Listener(Protocol):
    """Is called with the stages and notes of a command. No result depends on it."""

    def stage(self, name: str) -> AbstractContextManager[ProgressCallback]:
        """A stage begins; it ends with the context. The value is the callback for its progress."""
        ...

    def note(self, note: Note) -> None:
        """Something that a reader of the results must know."""
        ...


class NullListener:
    """Ignores stages and notes."""

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        yield ignore_progress

    def note(self, note: Note) -> None:
        pass
