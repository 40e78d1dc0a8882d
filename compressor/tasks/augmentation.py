"""Rows that are cut and joined, so that their lengths are those of other rows; they have no labels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from datasets import Dataset

from compressor.tasks.encoding import chunks_of, runs_between
from compressor.tasks.row_store import RowStore

_JOINED_SHARE = 0.5
"""Share of the replaced rows that are joined of two; a row that is too short for a cut always is."""


def augmented(rows: Dataset, pattern: Dataset, share: float, seed: int, special_ids: Collection[int]) -> Dataset:
    """Rows of which a share is replaced by a cut of the row, or by a part of it and a part of another row.

    For each replaced row, a row of the pattern is drawn, whose texts give the numbers of tokens, text by text. Special
    tokens stay where they are. What becomes of a row depends on the rows, the seed and its position alone.

    Args:
        rows: encoded rows, with columns `input_ids`, `attention_mask`, `labels`, `length` and possibly
            `token_type_ids`.
        pattern: rows of the lengths wanted.
        share: share of the rows that are replaced.
        seed: seed of the draws.
        special_ids: ids of the tokens that frame texts.

    Returns:
        As many rows, with the label zero.
    """
    store = RowStore()
    for start, chunk in chunks_of(rows):
        examples = [
            _replaced(rows, pattern, start + offset, share, seed, special_ids) or row
            for offset, row in enumerate(chunk)
        ]
        columns = {name: [example[name] for example in examples] for name in chunk.column_names}
        store.add(Dataset.from_dict({**columns, "labels": [0] * len(examples)}).data.table)
    return store.finish()


def _replaced(
    rows: Dataset, pattern: Dataset, position: int, share: float, seed: int, special_ids: Collection[int]
) -> dict[str, Any] | None:
    """What replaces the row at a position; None: the row stays."""
    rng = np.random.default_rng((seed, position))
    if rng.random() >= share:
        return None
    example = rows[position]
    texts, partner, model = (
        runs_between(row["input_ids"], special_ids)
        for row in (example, rows[int(rng.integers(len(rows)))], pattern[int(rng.integers(len(pattern)))])
    )
    if not texts or not len(texts) == len(partner) == len(model):  # a text is empty
        return None
    is_joined = rng.random() < _JOINED_SHARE
    parts = [
        _part(text, partner_text, len(wanted), rng, is_joined=is_joined)
        for text, partner_text, wanted in zip(texts, partner, model, strict=True)
    ]
    return _framed(example, parts, special_ids)


def _part(
    text: Sequence[int], partner: Sequence[int], count: int, rng: np.random.Generator, *, is_joined: bool
) -> list[int]:
    """A cut of a text with `count` tokens, or a part of it and a part of another; shorter where both are short."""
    if len(text) >= count and not (is_joined and count > 1):
        return list(_cut(text, count, rng))
    first = min(len(text), int(rng.integers(1, count)) if count > 1 else 1)
    if len(partner) < count - first:
        first = min(len(text), count - len(partner))
    return [*_cut(text, first, rng), *_cut(partner, min(len(partner), count - first), rng)]


def _cut(text: Sequence[int], count: int, rng: np.random.Generator) -> Sequence[int]:
    """Consecutive tokens of a text."""
    start = int(rng.integers(len(text) - count + 1))
    return text[start : start + count]


def _framed(example: Mapping[str, Any], parts: Sequence[Sequence[int]], special_ids: Collection[int]) -> dict[str, Any]:
    """A row with other texts between its special tokens."""
    types = example.get("token_type_ids", [0] * len(example["input_ids"]))
    remaining = iter(parts)
    ids: list[int] = []
    token_types: list[int] = []
    for is_special, run in groupby(zip(example["input_ids"], types, strict=True), lambda pair: pair[0] in special_ids):
        frame = list(run)
        tokens = [token for token, _ in frame] if is_special else list(next(remaining))
        ids += tokens
        token_types += [kind for _, kind in frame] if is_special else [frame[0][1]] * len(tokens)
    row = {**example, "input_ids": ids, "attention_mask": [1] * len(ids), "length": len(ids)}
    return row | ({"token_type_ids": token_types} if "token_type_ids" in example else {})
