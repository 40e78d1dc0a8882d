"""Listeners that record the reports of a run, and interrupt it at a given stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from compressor.progress import ProgressCallback
from compressor.results import Note, NoteCode


def interrupt() -> None:
    raise KeyboardInterrupt


class RecordingListener:
    """Records stages and notes, and calls a function when a stage begins.

    Args:
        stage: part of the name of the stage; empty: none.
        action: what to call.
    """

    def __init__(self, stage: str = "", action: Callable[[], None] = lambda: None) -> None:
        self.trigger, self.action = stage, action
        self.stages: list[str] = []
        self.notes: list[Note] = []

    @property
    def codes(self) -> list[NoteCode]:
        return [note.code for note in self.notes]

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        self.stages.append(name)
        if self.trigger and self.trigger in name:
            self.action()
        yield lambda finished, total: None

    def note(self, note: Note) -> None:
        self.notes.append(note)
