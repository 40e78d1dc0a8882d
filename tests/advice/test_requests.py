"""The advice of cli, config, run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.advice.entries import cli, config, conflicts, run
from tests.advice.follow import entries_of, follow
from tests.advice.world import Entry


@pytest.mark.parametrize("entry", entries_of(cli, config, conflicts, run))
def test_advice_is_followed(
    entry: Entry, inputs: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    follow(entry, inputs, monkeypatch, request)
