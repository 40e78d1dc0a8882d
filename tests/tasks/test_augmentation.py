"""Further rows that are cut and joined: parts of rows, in frames of special tokens, with the lengths of a pattern."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.model_folder import ModelFolder
from compressor.models.forwards import tensors_of
from compressor.tasks import open_data
from compressor.tasks.augmentation import extended
from compressor.tasks.base import Vocabulary
from tests.folders import rows_config
from tests.tasks.rows import labelled_rows, tsv

CLS, SEP, DRAWN = 2, 3, 10**6
VOCABULARY = Vocabulary(frozenset({CLS, SEP}), np.array([DRAWN]))
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def framed(texts: list[list[int]]) -> dict[str, list[int] | int]:
    """A row of one or two texts as BERT reads it."""
    ids, types = [CLS], [0]
    for number, text in enumerate(texts):
        ids += [*text, SEP]
        types += [number] * (len(text) + 1)
    return {
        "input_ids": ids,
        "attention_mask": [1] * len(ids),
        "token_type_ids": types,
        "labels": 1,
        "length": len(ids),
    }


def rows_of(lengths: list[int], texts: int) -> Dataset:
    """Rows whose tokens are all different."""
    return Dataset.from_list(
        [
            framed([[1000 * row + 100 * text + 10 + number for number in range(size)] for text in range(texts)])
            for row, size in enumerate(lengths, 1)
        ]
    )


def parts_of(row: dict[str, list[int]]) -> list[list[int]]:
    """The texts of a row."""
    texts: list[list[int]] = [[]]
    for token in row["input_ids"][1:-1]:
        if token == SEP:
            texts.append([])
        else:
            texts[-1].append(token)
    return texts


@settings(max_examples=20, deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 2), st.integers(0, 9), st.integers(0, 5))
def test_further_rows_are_parts_of_rows_with_lengths_of_the_pattern(
    lengths: list[int], wanted: list[int], texts: int, further: int, seed: int
) -> None:
    rows = rows_of(lengths, texts)
    result = extended(rows, rows_of(wanted, texts), len(rows) + further, seed, VOCABULARY)
    assert set(result["labels"]) == {0}
    for row, former in zip(result, rows, strict=False):
        assert row == {**former, "labels": 0}
    for position in range(len(rows), len(rows) + further):
        row = result[position]
        parts = parts_of(row)
        assert row == {**framed(parts), "labels": 0}
        assert len({len(part) for part in parts}) == 1
        for text, part in enumerate(parts):
            assert len(part) in wanted
            assert (
                part[0] in range(1000 * (position % len(rows) + 1), 1000 * (position % len(rows) + 2))
                or part[0] == DRAWN
            )
            assert all(token // 100 % 10 == text for token in part if token != DRAWN)
            kept = [token - number for number, token in enumerate(part) if token != DRAWN]
            starts = [start for start, _ in groupby(kept)]  # the offset changes where another part begins
            # A text ends where another begins, or it is cut there.
            assert len(starts) <= 2 + len(part) // min(lengths)


def test_a_row_depends_on_the_seed_and_its_position_alone(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", *labelled_rows(60))
    data = open_data(rows_config(path, path, path), classifier)
    vocabulary = data.task.vocabulary
    assert vocabulary is not None
    few, more, again, reseeded = (
        extended(data.train, data.eval, count, seed, vocabulary)["input_ids"][:]
        for count, seed in ((90, 0), (150, 0), (150, 0), (150, 1))
    )
    assert few == more[:90]
    assert more == again != reseeded
    assert sum(row == former for row, former in zip(more[60:], [*few[:60], *few[:30]], strict=True)) < 30
    batch = data.task.collate(list(extended(data.train, data.eval, 150, 0, vocabulary)))
    assert classifier.model(**tensors_of(batch)).logits.shape == (150, 2)


def test_a_row_with_an_empty_text_is_extended_by_rows_with_as_many_texts() -> None:
    rows = Dataset.from_list([framed([[11], []]), framed([[12], [13]]), framed([[], []])])
    vocabulary = VOCABULARY._replace(text_ids=np.array([11, 12, 13]))
    first, second, empty = extended(rows, rows, 6, 0, vocabulary)["input_ids"][3:]
    assert [token in vocabulary.text_ids for token in first] == [False, True, False, False]
    assert [token in vocabulary.text_ids for token in second] == [False, True, False, True, False]
    assert empty == [CLS, SEP, SEP]


def test_no_row_becomes_longer_than_all_others() -> None:
    """The text of the first row ends with special tokens, as one with their words in it does."""
    first = framed([[11]])
    ids = [CLS, 11, SEP, SEP, SEP]
    rows = Dataset.from_list(
        [first | {"input_ids": ids, "attention_mask": [1] * 5, "token_type_ids": [0] * 5, "length": 5}]
    )
    result = extended(rows, rows_of([4], 1), 4, 0, VOCABULARY)
    assert result["input_ids"][:] == [ids] * 4


def test_tokens_of_unknown_words_are_text(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", *labelled_rows(4))
    task = open_data(rows_config(path, path, path), classifier).task
    assert task.vocabulary is not None
    special_ids, text_ids = task.vocabulary
    assert classifier.processor.unk_token_id not in special_ids
    assert {classifier.processor.cls_token_id, classifier.processor.sep_token_id} <= special_ids
    assert not special_ids & {*text_ids}
    assert {*text_ids} < {*range(classifier.config.vocab_size)} & {*classifier.processor.get_vocab().values()}


def test_rows_without_token_types_are_read() -> None:
    rows = rows_of([3, 4], 1).remove_columns("token_type_ids")
    assert extended(rows, rows, 5, 0, VOCABULARY).column_names == rows.column_names
