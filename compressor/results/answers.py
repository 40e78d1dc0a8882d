"""Test rows with the answers of both engines, for a reader."""

from __future__ import annotations

from compressor.results.rows import Row


class AnsweredRow(Row):
    """A test row with the answers of both engines side by side, as text.

    `number` counts the test rows that are scored, from 1. `texts` are those of the row, as far as the model reads them,
    and `expected` its label; empty where the task has none. All are shortened; `changed` compares the whole answers.
    Where answers are embeddings, `cosine` is that of both engines' embeddings of a text, the lowest of the row, and
    `dense` and `compressed` are cosines between both texts.
    """

    number: int
    texts: tuple[str, ...]
    dense: str
    compressed: str
    expected: str = ""
    changed: bool = False
    cosine: float | None = None
