"""Calibration rows are training rows, each drawn at most once, with the lengths of the evaluation rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.model_folder import load
from compressor.targets import Feeds
from compressor.tasks import open_data
from compressor.tasks.base import Batch
from compressor.tasks.calibration import COMPARED_TOKENS, calibration_rows, compared_rows, within_tokens
from tests.folders import rows_config

LENGTHS = st.lists(st.integers(1, 30), max_size=12)


def collate(examples: Sequence[dict[str, Any]]) -> Batch:
    """A batch of examples of one length."""
    ids = np.array([example["input_ids"] for example in examples])
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": np.zeros(len(examples))}


def rows_of(lengths: Sequence[int]) -> Dataset:
    """Rows of these lengths, which consist of their own number."""
    ids = [[number] * length for number, length in enumerate(lengths)]
    return Dataset.from_dict({"input_ids": ids, "length": list(lengths)})


def data_of(train: Sequence[int], evaluation: Sequence[int] = ()) -> Any:
    """Training and evaluation rows of these lengths, of a task whose labels are `labels`."""
    task = SimpleNamespace(collate=collate, label_name="labels")
    return SimpleNamespace(train=rows_of(train), eval=rows_of(evaluation), task=task)


def numbers(rows: Sequence[Feeds]) -> list[int]:
    """Numbers of the training rows that were drawn."""
    return [int(feeds["input_ids"][0, 0]) for feeds in rows]


def drawn_lengths(rows: Sequence[Feeds]) -> list[int]:
    return [feeds["input_ids"].shape[1] for feeds in rows]


@settings(max_examples=15, deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 20), st.integers(0, 3))
def test_each_training_row_is_drawn_at_most_once(
    train: list[int], evaluation: list[int], count: int, seed: int
) -> None:
    rows = calibration_rows(data_of(train, evaluation), count, seed)
    assert len(rows) == min(count, len(train))
    assert len(set(numbers(rows))) == len(rows)
    assert [train[number] for number in numbers(rows)] == drawn_lengths(rows)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 200), st.randoms())
def test_as_many_rows_are_kept_as_the_tokens_allow(lengths: list[int], tokens: int, random: Random) -> None:
    rows = random.sample(range(len(lengths)), len(lengths))
    kept = within_tokens(data_of(lengths), rows, tokens)
    assert kept == rows[: len(kept)]
    assert len(kept) == 1 or sum(lengths[row] for row in kept) <= tokens
    assert len(kept) == len(rows) or sum(lengths[row] for row in rows[: len(kept) + 1]) > tokens


def test_each_row_is_a_batch_of_one_without_labels() -> None:
    for feeds in calibration_rows(data_of([3, 5, 4], [4]), 3, seed=0):
        assert set(feeds) == {"input_ids", "attention_mask"}
        assert all(isinstance(array, np.ndarray) and array.shape[0] == 1 for array in feeds.values())


@pytest.mark.parametrize("length", [2, 17, 40])
def test_rows_of_the_nearest_lengths_are_drawn(length: int) -> None:
    train = list(range(1, 41))
    drawn = drawn_lengths(calibration_rows(data_of(train, [length] * 5), 7, seed=0))
    nearest = sorted(train, key=lambda row_length: abs(row_length - length))
    assert max(abs(row_length - length) for row_length in drawn) <= abs(nearest[6] - length)


def test_lengths_are_distributed_as_those_of_the_evaluation_rows() -> None:
    train = [5] * 200 + [20] * 200 + [30] * 200
    drawn = drawn_lengths(calibration_rows(data_of(train, [5] * 30 + [30] * 10), 100, seed=0))
    assert 20 not in drawn
    assert 60 <= drawn.count(5) <= 90
    assert len(drawn) == 100


def test_lengths_are_those_of_the_training_rows_without_evaluation_rows() -> None:
    drawn = drawn_lengths(calibration_rows(data_of([5] * 300 + [30] * 100), 100, seed=0))
    assert 60 <= drawn.count(5) <= 90


def test_all_rows_are_drawn_where_more_are_requested() -> None:
    train = [9, 1, 5, 5, 20]
    assert sorted(numbers(calibration_rows(data_of(train, [5, 6]), 50, seed=0))) == [0, 1, 2, 3, 4]


def test_nothing_is_drawn_without_training_rows() -> None:
    assert calibration_rows(data_of([], [4]), 3, seed=0) == []
    assert calibration_rows(data_of([]), 3, seed=0) == []


def test_the_draw_depends_on_the_seed_alone() -> None:
    data = data_of([4] * 50 + [7] * 50, [4, 7])
    draws = [numbers(calibration_rows(data, 10, seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_rows_of_equal_lengths_are_drawn_at_random() -> None:
    drawn = numbers(calibration_rows(data_of([6] * 100, [6]), 10, seed=0))
    assert drawn != sorted(drawn)
    assert max(drawn) > 20


def test_rows_of_a_task_are_inputs_of_its_model(inputs: Path) -> None:
    folder = load(inputs / "model")
    data = open_data(rows_config(str(inputs / "rows.tsv"), max_length=8), folder)
    rows = calibration_rows(data, 12, seed=0)
    assert len(rows) == 12
    for feeds in rows:
        with torch.no_grad():
            outputs = folder.model(**{name: torch.from_numpy(np.asarray(array)) for name, array in feeds.items()})
        assert outputs.logits.shape == (1, 2)
        assert outputs.loss is None, "labels are left out"
        assert feeds["attention_mask"].all(), "one row needs no padding"


@settings(deadline=None)
@given(st.lists(st.integers(1, 600), min_size=1, max_size=50), st.integers(1, 1000))
def test_where_each_token_has_an_answer_few_rows_are_compared(lengths: list[int], most: int) -> None:
    classifies, generates = (SimpleNamespace(generates=generates) for generates in (False, True))
    rows, mean = rows_of(lengths), float(np.mean(lengths))
    assert compared_rows(classifies, rows, most) == most  # type: ignore[arg-type]
    count = compared_rows(generates, rows, most)  # type: ignore[arg-type]
    assert 1 <= count <= most
    assert count == most or COMPARED_TOKENS <= count * mean + 1e-6 < COMPARED_TOKENS + mean + 1e-3
