"""Numbers with decimal commas, as many European spreadsheets write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"[+-]?\d+(?:,(\d+))?")
_THOUSANDS = 3
"""Digits behind a comma that may separate thousands."""


def with_points(texts: Sequence[str]) -> list[str]:
    """Numbers as text with decimal points, if their commas are decimal ones; the same texts otherwise.

    Commas are decimal if every text is a number with a comma or without one, and not all commas are followed by three
    digits, as those between thousands are.
    """
    matches = [_NUMBER.fullmatch(text) for text in texts]
    decimals = {len(match.group(1)) for match in matches if match is not None and match.group(1)}
    if None in matches or decimals <= {_THOUSANDS}:
        return list(texts)
    return [text.replace(",", ".") for text in texts]
