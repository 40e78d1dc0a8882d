"""The test of entries: each provokes its message and follows it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.advice.world import ENTRIES, Entry, World, site_of


def entries_of(*modules: ModuleType) -> list[object]:
    """The entries of modules of the table, as parameters of a test."""
    names = {module.__name__ for module in modules}
    return [
        pytest.param(entry, id=entry.key, marks=[pytest.mark.zoo] if entry.zoo else [])
        for entry in ENTRIES
        if entry.module in names
    ]


def follow(entry: Entry, inputs: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Provoke the message of an entry and follow it."""
    monkeypatch.chdir(inputs)
    world = World(inputs, site_of(entry.key), monkeypatch, request)
    entry.follow(world)
    assert world.provoked, "nothing provokes the message"
    assert world.followed or entry.unfollowed, "the advice is not followed"
