"""Batches of similar length, statistics that do not depend on them, and samples of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor.model_folder import ModelFolder
from compressor.tasks import Data, batches, open_data, statistics
from compressor.tasks.classification import TextClassification
from compressor.tasks.scoring import sample_of
from tests.folders import rows_config
from tests.tasks.rows import forward_of, labelled_rows, tsv


@pytest.fixture
def data(classifier: ModelFolder, tmp_path: Path) -> Data:
    return open_data(rows_config(tsv(tmp_path / "a.tsv", *labelled_rows(40))), classifier)


def test_every_row_is_in_one_batch_of_rows_of_similar_length(data: Data) -> None:
    batched = list(batches(data.task, data.train, 8))
    assert sorted(index for indices, _ in batched for index in indices) == list(range(len(data.train)))
    widths = [batch["input_ids"].shape[1] for _, batch in batched]
    assert widths == sorted(widths, reverse=True)


def test_statistics_do_not_depend_on_the_batch(data: Data, classifier: ModelFolder) -> None:
    reports: list[tuple[int, int]] = []
    whole = statistics(data.task, data.train, forward_of(classifier.model), 36)
    forward = forward_of(classifier.model)
    assert np.array_equal(
        whole, statistics(data.task, data.train, forward, 5, lambda done, total: reports.append((done, total)))
    )
    assert reports == [(done, 36) for done in (*range(5, 36, 5), 36)]
    assert whole[:, 1].tolist() == list(data.train["labels"])
    assert data.task.score(whole) == np.mean(whole[:, 0] == whole[:, 1])


def test_a_sample_stands_for_all_rows(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    task, rows = data.task, data.train
    rows = rows.add_column("number", list(range(len(rows))))
    sample, again, reseeded = (sample_of(task, rows, 10, seed)["number"][:] for seed in (1, 1, 2))
    assert len(sample) == 10
    assert sample == sorted(set(sample)) == again != reseeded
    assert sample_of(task, rows, len(rows), 1)["number"][:] == list(range(len(rows)))
    monkeypatch.setattr(type(task), "joined_rows", 7)  # lines that are encoded as one text: rows are drawn all the same
    assert sample_of(task, rows, 10, 1)["number"][:] == sample
    task.set_aside_by = "number"  # the metric needs every row
    assert len(sample_of(task, rows, 10, 1)) == len(rows)


def test_a_sample_of_rows_in_order_is_their_beginning(data: Data) -> None:
    class Ordered(TextClassification):
        in_order = True

    rows = data.train.add_column("number", list(range(len(data.train))))
    data.task.__class__ = Ordered
    assert sample_of(data.task, rows, 10, 1)["number"][:] == list(range(10))
