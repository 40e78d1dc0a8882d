"""Encoded rows as text for a reader: decoded tokens, shortened, or the file name of an image."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

_TEXTS = 2
"""Maximum number of texts of a row that are shown."""
_FRAMES = ("bos_token_id", "cls_token_id", "eos_token_id", "pad_token_id", "sep_token_id")
"""Attributes of a tokenizer with the tokens that separate texts; a mask is a part of its text."""


def row_texts(example: Mapping[str, Any], tokenizer: Any) -> tuple[str, ...]:
    """The first texts of an encoded row, e.g. question and context, or its file; empty for rows that have neither.

    Args:
        example: the row, with `file`, or with `input_ids`, which may be a list for each text or window.
        tokenizer: its `decode` converts ids to text; None: there is none.
    """
    if file := example.get("file"):
        return (shorten(file),)
    ids = example.get("input_ids")
    if not hasattr(tokenizer, "decode") or not ids:
        return ()
    frames = {getattr(tokenizer, name, None) for name in _FRAMES}
    parts = [ids] if isinstance(ids[0], int) else ids
    runs = itertools.chain.from_iterable(_split(part, frames) for part in parts)
    return tuple(shorten(tokenizer.decode(run)) for run in itertools.islice(runs, _TEXTS))


def _split(ids: Sequence[int], frames: set[int | None]) -> list[list[int]]:
    """The consecutive ids between tokens of a frame."""
    return [list(run) for is_frame, run in itertools.groupby(ids, frames.__contains__) if not is_frame]


def shorten(text: str, characters: int = 120) -> str:
    """A text on one line, cut after a number of characters."""
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[: characters - 1]}…"


def shorten_both(first: str, second: str, characters: int = 120) -> tuple[str, str]:
    """Two texts on one line each, cut so that the place where they begin to differ is shown."""
    texts = [" ".join(text.split()) for text in (first, second)]
    pairs = zip(*texts, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    start = common - characters // 2
    if start <= 0 or texts[0] == texts[1]:
        return shorten(first, characters), shorten(second, characters)
    return shorten(f"…{texts[0][start:]}", characters), shorten(f"…{texts[1][start:]}", characters)
