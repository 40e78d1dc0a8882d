"""Families of models as parameters of tests: a few in quick tests, all of them in the zoo."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def families(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """The names, of which those that are not quick are marked."""
    names = list(names)
    assert set(quick) <= set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.zoo) for name in names]
