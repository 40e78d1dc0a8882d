"""A listener that collects notes."""

from __future__ import annotations

from compressor.progress import NullListener
from compressor.results import Note, NoteCode


class NoteListener(NullListener):
    """Collects the codes of notes, in order."""

    def __init__(self) -> None:
        self.codes: list[NoteCode] = []

    def note(self, note: Note | str) -> None:
        assert isinstance(note, Note)
        self.codes.append(note.code)
