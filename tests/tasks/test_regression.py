"""Regression: rows become tokens and numbers, and logits become correlations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from compressor.errors import ErrorCode
from compressor.model_folder import ModelFolder, load
from compressor.results import MetricUnit
from compressor.tasks import open_data, statistics
from tests import folders
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.rows import forward_of, tsv


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


def test_a_model_of_several_outputs_is_refused(tmp_path: Path) -> None:
    several = load(folders.save(folders.bert(problem_type="regression"), tmp_path / "several"))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="num_labels", value=2):
        open_data(rows_config(tsv(tmp_path / "a.tsv", "1\ta", "2\tb")), several)
