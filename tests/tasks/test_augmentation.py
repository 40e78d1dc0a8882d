"""Rows that are cut and joined: parts of the rows, in frames of special tokens, with the lengths of a pattern."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.model_folder import ModelFolder
from compressor.models.forwards import tensors_of
from compressor.tasks import open_data
from compressor.tasks.augmentation import augmented
from tests.folders import rows_config
from tests.tasks.rows import labelled_rows, tsv

CLS, SEP = 2, 3
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


@settings(max_examples=10, deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 2), st.integers(0, 5))
def test_every_row_becomes_parts_of_two_rows_with_lengths_of_the_pattern(
    lengths: list[int], wanted: list[int], texts: int, seed: int
) -> None:
    rows = rows_of(lengths, texts)
    result = augmented(rows, rows_of(wanted, texts), 1.0, seed, {CLS, SEP})
    assert len(result) == len(rows)
    assert set(result["labels"]) == {0}
    for number, row in enumerate(result, 1):
        assert row == {**framed(parts_of(row)), "labels": 0}
        for text, part in enumerate(parts_of(row)):
            assert 1 <= len(part) <= max(wanted)
            starts = [i for i, token in enumerate(part) if i == 0 or token != part[i - 1] + 1]
            assert len(starts) <= 2
            assert part[0] // 1000 == number
            assert all(token // 100 % 10 == text for token in part)
            if min(lengths) >= max(wanted):
                assert len(part) in wanted


def test_a_row_depends_on_the_seed_and_its_position_alone(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", *labelled_rows(60))
    data = open_data(rows_config(path, path, path), classifier)
    special_ids = data.task.special_ids
    assert special_ids is not None
    none, half, again, reseeded = (
        augmented(data.train, data.eval, share, seed, special_ids)["input_ids"][:]
        for share, seed in ((0.0, 0), (0.5, 0), (0.5, 0), (0.5, 1))
    )
    assert none == data.train["input_ids"][:]
    assert half == again != reseeded
    kept = sum(row == former for row, former in zip(half, none, strict=True))
    assert 15 < kept < 60
    batch = data.task.collate(list(augmented(data.train, data.eval, 1.0, 0, special_ids)))
    assert classifier.model(**tensors_of(batch)).logits.shape == (60, 2)


def test_a_row_with_an_empty_text_stays() -> None:
    rows = Dataset.from_list([framed([[11], []]), framed([[12], [13]])])
    assert augmented(rows, rows, 1.0, 0, {CLS, SEP})[0]["input_ids"] == [CLS, 11, SEP, SEP]


def test_tokens_of_unknown_words_are_text(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", *labelled_rows(4))
    task = open_data(rows_config(path, path, path), classifier).task
    assert task.special_ids is not None
    assert classifier.processor.unk_token_id not in task.special_ids
    assert {classifier.processor.cls_token_id, classifier.processor.sep_token_id} <= task.special_ids


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_rows_without_token_types_are_read(share: float) -> None:
    rows = rows_of([3, 4], 1).remove_columns("token_type_ids")
    assert augmented(rows, rows, share, 0, {CLS, SEP}).column_names == rows.column_names
