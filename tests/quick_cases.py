"""Cases of a parametrized test, most of which only `make zoo` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """The cases, of which all but the chosen ones are marked `zoo`."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.zoo) for case in cases]
