"""Runs that remove as many units as the metric allows: their exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.errors import ErrorCode
from compressor.pruning import bisect
from compressor.report import load as load_report
from compressor.results import DropStatus
from tests.command import compress

SHORT = ["--method", "reconstruct", *"--batch 1 --seq 8 --seconds 0.01 --threads 1 --max-length 8 --quiet".split()]


@pytest.mark.usefixtures("times_by_macs")
def test_a_loss_on_the_test_rows_alone_ends_with_its_exit_code(
    answered: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model answers all test rows rightly, and the bisection accepts every plan."""
    monkeypatch.setattr(bisect, "upper_losses", lambda dense, scores, **kind: [0.0] * len(scores))
    rows, out = answered / "rows.tsv", tmp_path / "out"
    data: list[str | Path] = ["--data", rows, "--test-data", rows]
    result = compress(capfd, answered / "model", *data, "--max-drop", "0", *SHORT, "-o", out)
    assert (result.code, result.error_code) == (4, ErrorCode.METRIC_FELL)
    report = load_report(out)
    assert report.drop_status is DropStatus.FAILED
    assert report.scores[0].dense == 1
    assert report.plan.neurons_kept + report.plan.heads_kept < report.plan.neurons + report.plan.heads


@pytest.mark.usefixtures("times_by_macs")
def test_rows_of_another_task_end_the_bisection(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole model gives one answer to all rows, so that no plan could lose anything."""
    rows: list[str | Path] = ["--data", inputs / "rows.tsv"]
    result = compress(capfd, inputs / "model", *rows, "--max-drop", "0.01", *SHORT, "-o", tmp_path / "out")
    assert (result.code, result.error_code) == (3, ErrorCode.LABEL_MISMATCH)
    assert "accuracy: the whole model scores 0.6667 on the evaluation rows" in result.err
    assert not (tmp_path / "out").exists()
