"""Cases of a slow property, of which some are quick tests and the rest belongs to the zoo."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def mostly_zoo(cases: Iterable[object], *quick: object) -> list[object]:
    """Cases as parameters: those of `quick` as they are, the others in the zoo."""
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.zoo]) for case in cases]
