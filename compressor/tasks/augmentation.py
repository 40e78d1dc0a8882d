"""Cut and join texts of examples without labels, so that they have the lengths of a pattern."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from datasets import Dataset

from compressor.tasks.encoding import encode_chunks, runs_between

_JOINED_SHARE = 0.5
"""Share of the replaced texts that are parts of two texts; a text that is too short for a cut always is."""


def augmented(rows: Dataset, pattern: Dataset, share: float, seed: int, special_ids: Collection[int]) -> Dataset:
    """Replace a share of examples by a part of their texts, or by a part of them and a part of another example's.

    The texts get as many tokens as those of an example of `pattern`, which is drawn. Special tokens, which separate
    texts, stay where they are. The result for an example depends only on the examples, the seed and its position.

    Args:
        rows: examples with columns `input_ids`, `attention_mask`, `labels`, `length` and, possibly, `token_type_ids`.

    Returns:
        As many examples, with the label zero.
    """

    def replace(chunk: Dataset, start: int) -> tuple[dict[str, Any], int]:
        examples = [
            _replaced(rows, pattern, position, share, seed, special_ids) or row
            for position, row in enumerate(chunk, start)
        ]
        columns = {name: [example[name] for example in examples] for name in chunk.column_names}
        return {**columns, "labels": [0] * len(examples)}, 0

    return encode_chunks(rows, replace)[0]


def _replaced(
    rows: Dataset, pattern: Dataset, position: int, share: float, seed: int, special_ids: Collection[int]
) -> dict[str, Any] | None:
    """The replacement of the example at a position; None if it stays."""
    rng = np.random.default_rng((seed, position))
    if rng.random() >= share:
        return None
    example = rows[position]
    texts, partner, wanted = (
        runs_between(drawn["input_ids"], special_ids)
        for drawn in (example, rows[int(rng.integers(len(rows)))], pattern[int(rng.integers(len(pattern)))])
    )
    if not texts or not len(texts) == len(partner) == len(wanted):  # a text is empty
        return None
    is_joined = rng.random() < _JOINED_SHARE
    parts = [
        _part(text, partner_text, len(wanted_text), rng, is_joined=is_joined)
        for text, partner_text, wanted_text in zip(texts, partner, wanted, strict=True)
    ]
    return _framed(example, parts, special_ids)


def _part(
    text: Sequence[int], partner: Sequence[int], count: int, rng: np.random.Generator, *, is_joined: bool
) -> list[int]:
    """`count` consecutive tokens of a text, or a part of it and a part of its partner; fewer if both are short."""

    def cut(text: Sequence[int], count: int) -> Sequence[int]:
        start = int(rng.integers(len(text) - count + 1))
        return text[start : start + count]

    if len(text) >= count and not (is_joined and count > 1):
        return list(cut(text, count))
    first = min(len(text), int(rng.integers(1, count)) if count > 1 else 1)
    if len(partner) < count - first:
        first = min(len(text), count - len(partner))
    return [*cut(text, first), *cut(partner, min(len(partner), count - first))]


def _framed(example: Mapping[str, Any], parts: Sequence[Sequence[int]], special_ids: Collection[int]) -> dict[str, Any]:
    types = example.get("token_type_ids", [0] * len(example["input_ids"]))
    remaining = iter(parts)
    pairs: list[tuple[int, int]] = []
    for is_special, run in groupby(zip(example["input_ids"], types, strict=True), lambda pair: pair[0] in special_ids):
        frame = list(run)
        pairs += frame if is_special else [(token, frame[0][1]) for token in next(remaining)]
    ids = [token for token, _ in pairs]
    row = {**example, "input_ids": ids, "attention_mask": [1] * len(ids), "length": len(ids)}
    return row | ({"token_type_ids": [kind for _, kind in pairs]} if "token_type_ids" in example else {})
