"""How a long stage tells how far it is, whoever listens: a terminal, a test, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from compressor.results import Note

ProgressCallback = Callable[[int, int], None]
"""Called with (done, total)."""


class Listener(Protocol):
    """Hears what a run does. Nothing that a run computes depends on it."""

    def stage(self, name: str) -> AbstractContextManager[ProgressCallback]:
        """A stage begins; it ends with the context."""
        ...

    def note(self, note: Note | str) -> None:
        """Something that a reader must know, in one line."""
        ...


class NullListener:
    """Hears nothing."""

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        yield lambda done, total: None

    def note(self, note: Note | str) -> None:
        pass
