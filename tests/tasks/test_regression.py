"""Regression: rows become tokens and numbers, and logits become correlations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import spearmanr

from compressor.errors import ErrorCode
from compressor.model_folder import ModelFolder, load
from compressor.results import MetricUnit
from compressor.tasks import open_data, statistics
from tests import folders
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.rows import forward_of, jsonl, tsv


def test_rows_become_batches_and_correlations(scorer: ModelFolder, tmp_path: Path) -> None:
    rows = [f"{index / 4}\t{'good ' * (index % 3)}{index}\tbad" for index in range(12)]
    path = tsv(tmp_path / "a.tsv", *rows, header="score\tsentence1\tsentence2")
    data = open_data(rows_config(path, path, path), scorer)
    batch = data.task.collate([data.train[index] for index in range(4)])
    assert (batch["labels"].dtype, batch["labels"].tolist()) == (torch.float32, [0.0, 0.25, 0.5, 0.75])
    outputs = scorer.model(**batch)
    assert outputs.loss.item() == pytest.approx(((outputs.logits[:, 0] - batch["labels"]) ** 2).mean().item())
    measured = statistics(data.task, data.test, forward_of(scorer.model), 5)
    assert measured[:, 1].tolist() == [index / 4 for index in range(12)]
    assert data.task.score(measured) == pytest.approx(spearmanr(measured[:, 0], measured[:, 1]).statistic)
    assert (data.task.metric, data.task.metric_unit) == ("spearman", MetricUnit.RAW)


def test_equal_labels_are_refused(scorer: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.INVALID_ROWS, column="label", value=1.0):
        open_data(rows_config(tsv(tmp_path / "a.tsv", "1\ta", "1\tb")), scorer)


def test_equal_labels_of_test_rows_are_refused(scorer: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "a.tsv", "1\ta", "2\tb")
    with fails_with(ErrorCode.INVALID_ROWS, field="test_data"):
        open_data(rows_config(rows, rows, tsv(tmp_path / "t.tsv", "-1.0\ta", "-1.0\tb")), scorer)


def test_labels_that_are_not_numbers_are_refused(scorer: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.INVALID_ROWS, column="label", row=1, value="high"):
        open_data(rows_config(tsv(tmp_path / "a.tsv", "high\ta", "1\tb")), scorer)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A BERT that predicts two numbers."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("several")
    return load(folders.save(folders.bert(problem_type="regression", id2label={0: "joy", 1: "fear"}), path))


def _numbers(index: int) -> tuple[float, float]:
    return index / 4, float((7 * index) % 12)


def test_several_numbers_have_the_mean_of_their_correlations(several: ModelFolder, tmp_path: Path) -> None:
    texts = [f"{'good ' * (index % 3)}{index}" for index in range(12)]
    lists = jsonl(
        tmp_path / "a.jsonl",
        *({"text": text, "labels": list(_numbers(index))} for index, text in enumerate(texts)),
    )
    rows = ["\t".join((text, *(f"{number}" for number in _numbers(index)))) for index, text in enumerate(texts)]
    columns = tsv(tmp_path / "a.tsv", *rows, header="text\tjoy\tfear")
    data, of_columns = (open_data(rows_config(path, path, path), several) for path in (lists, columns))
    assert list(data.train["labels"]) == list(of_columns.train["labels"]) == [list(_numbers(i)) for i in range(12)]
    batch = data.task.collate(list(data.train))
    loss = several.model(**batch).loss.item()
    measured = statistics(data.task, data.test, forward_of(several.model), 5)
    assert loss == pytest.approx(np.square(measured[:, :2] - measured[:, 2:]).mean(), rel=1e-5)
    expected = [spearmanr(measured[:, number], measured[:, 2 + number]).statistic for number in range(2)]
    assert data.task.score(measured) == pytest.approx(np.mean(expected))
    assert data.task.constant_score(measured) == 0
    assert data.task.encode_unlabelled(Dataset.from_dict({"text": ["good"]}), "rows")["labels"][:] == [[0.0, 0.0]]


def test_one_number_for_a_model_of_several_is_refused(several: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.INVALID_ROWS, row=1, column="label", count=2):
        open_data(rows_config(tsv(tmp_path / "a.tsv", "1\ta", "2\tb")), several)


def test_a_number_that_is_the_same_in_every_row_is_refused(several: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.INVALID_ROWS, column="fear", value=3.0):
        open_data(rows_config(tsv(tmp_path / "a.tsv", "a\t1\t3", "b\t2\t3", header="text\tjoy\tfear")), several)
