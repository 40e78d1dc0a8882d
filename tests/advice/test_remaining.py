"""The advice of the remaining modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.advice.entries import graph, rest
from tests.advice.follow import entries_of, follow
from tests.advice.world import Entry


@pytest.mark.parametrize("entry", entries_of(graph, rest))
def test_advice_is_followed(
    entry: Entry, inputs: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    follow(entry, inputs, monkeypatch, request)
