"""Further examples, made from parts of existing texts, for a training that would read few examples many times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from datasets import Dataset

from compressor.tasks.base import Vocabulary
from compressor.tasks.encoding import encode_chunks, runs_between

_JOINED_SHARE = 0.5
"""Share of the texts that are joined from parts, although a part of one text would be long enough."""
_CHANGED_SHARE, _CHANGED_TOKENS = 0.5, 0.2
"""Share of the texts in which tokens are replaced, and maximum share of replaced tokens: few examples contain few of
the tokens that a model will read."""

Texts = list[list[int]]
"""The tokens of each text of an example."""


def extended(rows: Dataset, pattern: Dataset, count: int, seed: int, vocabulary: Vocabulary) -> Dataset:
    """Examples and further ones, each made of a part of the texts of an example, or of parts of several.

    The texts of a further example are as long as those of an example of `pattern`, which is drawn. In some, a few
    tokens are replaced by tokens drawn from the vocabulary. The special tokens, which separate texts, are those of an
    example of `rows`; each example is used equally often. A further example depends only on the examples, the seed and
    its position. Examples without tokens between special tokens are repeated unchanged, and so are examples that would
    become longer than all others.

    Args:
        rows: examples with columns `input_ids`, `attention_mask`, `labels`, `length` and, possibly, `token_type_ids`.
        pattern: examples of the lengths that are wanted.
        count: number of examples that are returned, at least those of `rows`.

    Returns:
        The examples of `rows` and further ones, all with the label zero.
    """
    texts, patterns = (_texts_by_number(examples, vocabulary.special_ids) for examples in (rows, pattern))
    longest = max(int(np.max(examples["length"][:])) for examples in (rows, pattern))

    def example(position: int, row: dict[str, Any]) -> Mapping[str, Any]:
        if position < len(rows):
            return row
        further = _further(row, texts, patterns, (seed, position), vocabulary)
        return further if further["length"] <= longest else row  # it has more special tokens than the pattern

    def extend(chunk: Dataset, start: int) -> tuple[dict[str, Any], int]:
        examples = [example(position, row) for position, row in enumerate(chunk, start)]
        columns = {name: [each[name] for each in examples] for name in chunk.column_names}
        return {**columns, "labels": [0] * len(examples)}, 0

    return encode_chunks(rows.select(np.resize(np.arange(len(rows)), count)), extend)[0]


def _texts_by_number(examples: Dataset, special_ids: frozenset[int]) -> dict[int, list[Texts]]:
    """Number of texts -> the texts of each example that has as many."""
    grouped: dict[int, list[Texts]] = {}
    for ids in examples["input_ids"][:]:
        texts = runs_between(ids, special_ids)
        grouped.setdefault(len(texts), []).append(texts)
    return grouped


def _further(
    example: Mapping[str, Any],
    texts: Mapping[int, Sequence[Texts]],
    patterns: Mapping[int, Sequence[Texts]],
    seed: tuple[int, int],
    vocabulary: Vocabulary,
) -> Mapping[str, Any]:
    """An example with the special tokens of another, whose texts begin with parts of its texts."""
    whole = runs_between(example["input_ids"], vocabulary.special_ids)
    if not whole:
        return example
    rng = np.random.default_rng(seed)
    partners, lengths = texts[len(whole)], patterns.get(len(whole)) or texts[len(whole)]
    wanted = [len(text) for text in _draw(lengths, rng)]
    parts = [_part(text, wanted[number], partners, number, rng) for number, text in enumerate(whole)]
    if rng.random() < _CHANGED_SHARE:
        share = _CHANGED_TOKENS * rng.random()
        parts = [_changed(part, share, vocabulary.text_ids, rng) for part in parts]
    return _framed(example, parts, vocabulary.special_ids)


def _part(
    text: Sequence[int], count: int, partners: Sequence[Texts], number: int, rng: np.random.Generator
) -> list[int]:
    """`count` tokens: consecutive ones of a text, or some of it and of the texts of partners with the same number."""
    if len(text) >= count and not (count > 1 and rng.random() < _JOINED_SHARE):
        return _cut(text, count, rng)
    tokens = _cut(text, int(rng.integers(1, count)) if count > 1 else 1, rng)
    while len(tokens) < count:
        tokens += _cut(_draw(partners, rng)[number], count - len(tokens), rng)
    return tokens


def _changed(tokens: Sequence[int], share: float, vocabulary: np.ndarray, rng: np.random.Generator) -> list[int]:
    """Tokens, a share of them replaced by random tokens."""
    drawn = rng.choice(vocabulary, len(tokens))
    changed: list[int] = np.where(rng.random(len(tokens)) < share, drawn, tokens).tolist()
    return changed


def _draw(examples: Sequence[Texts], rng: np.random.Generator) -> Texts:
    return examples[int(rng.integers(len(examples)))]


def _cut(text: Sequence[int], count: int, rng: np.random.Generator) -> list[int]:
    """At most `count` consecutive tokens of a text, all of a shorter one."""
    start = int(rng.integers(max(0, len(text) - count) + 1))
    return list(text[start : start + count])


def _framed(example: Mapping[str, Any], parts: Sequence[Sequence[int]], special_ids: frozenset[int]) -> dict[str, Any]:
    """An example with the special tokens of another, and other texts between them."""
    types = example.get("token_type_ids", [0] * len(example["input_ids"]))
    remaining = iter(parts)
    pairs: list[tuple[int, int]] = []
    for is_special, run in groupby(zip(example["input_ids"], types, strict=True), lambda pair: pair[0] in special_ids):
        frame = list(run)
        pairs += frame if is_special else [(token, frame[0][1]) for token in next(remaining)]
    ids = [token for token, _ in pairs]
    row = {**example, "input_ids": ids, "attention_mask": [1] * len(ids), "length": len(ids)}
    return row | ({"token_type_ids": [kind for _, kind in pairs]} if "token_type_ids" in example else {})
