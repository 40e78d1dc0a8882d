"""The bisection over shares of time: where it goes on, which plans keep the metric, and its exit code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import ErrorCode
from compressor.report import load as load_report
from compressor.results import DropStatus
from compressor.run.pruning import bisect_metric
from compressor.run.pruning.bisect_metric import _holding, _next_share, _Trial
from compressor.run.pruning.metric_trials import ResampledScore
from tests.command import compress

LEAST = 0.08
SHORT = ["--method", "reconstruct", *"--batch 1 --seq 8 --seconds 0.01 --threads 1 --max-length 8 --quiet".split()]


def trial(share: float, cost: float | None = None, loss: float = 0.0, divergence: float = 0.01) -> Any:
    """A plan that was chosen for a share of the time, and takes no more."""
    metric = 0.9 - loss
    plan: Any = SimpleNamespace(cost=share if cost is None else cost)
    return _Trial(share, plan, ResampledScore(metric, np.full(50, metric), divergence))


@given(st.floats(LEAST, 1.0))
def test_the_bisection_closes_in_on_the_fastest_plan_that_holds(fastest: float) -> None:
    """Plans that cost less than one of them lose too much."""
    trials: list[Any] = []
    while share := _next_share(trials, holding := [part for part in trials if part.plan.cost >= fastest], LEAST):
        assert LEAST <= share <= 1
        assert all(share < part.plan.cost for part in holding)
        assert all(share > part.share for part in trials if part not in holding)
        trials.append(trial(share))
        assert len(trials) < 40
    held = min((part.plan.cost for part in trials if part.plan.cost >= fastest), default=1.0)
    failed = max((part.share for part in trials if part.plan.cost < fastest), default=LEAST)
    assert held <= 1.01 * failed


def test_a_failure_above_a_plan_that_holds_bounds_nothing() -> None:
    held, failed = trial(0.5), trial(0.7)
    assert _next_share([failed, held], [held], LEAST) == pytest.approx(math.sqrt(LEAST * 0.5))


@pytest.mark.parametrize(
    ("max_drop", "quantization_drop", "expected"),
    [
        (0.03, 0.0, [0.01, 0.02, 0.03]),
        (0.03, 0.015, [0.01]),
        (0.03, -0.02, [0.01, 0.02, 0.03]),
        (0.0, 0.0, []),
        (None, 0.0, []),
        (0.1, 0.2, []),
    ],
)
def test_plans_hold_whose_loss_is_allowed_beside_that_of_the_precision(
    max_drop: float | None, quantization_drop: float, expected: Sequence[float]
) -> None:
    losses = [0.01, 0.02, 0.03, 0.04]
    trials = [trial(0.5, loss=loss, divergence=loss) for loss in losses]
    run: Any = SimpleNamespace(
        step=SimpleNamespace(max_drop=max_drop),
        data=SimpleNamespace(task=SimpleNamespace(higher_is_better=True)),
        quantization_drop=quantization_drop,
    )
    holding = _holding(run, ResampledScore(0.9, np.full(50, 0.9), 0.0), trials)
    assert [loss for loss, part in zip(losses, trials, strict=True) if part in holding] == expected


@pytest.mark.usefixtures("times_by_macs")
def test_a_loss_on_the_test_rows_alone_ends_with_its_exit_code(
    answered: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model answers all test rows rightly, and the bisection accepts every plan."""
    monkeypatch.setattr(bisect_metric, "upper_losses", lambda dense, scores, **kind: [0.0] * len(scores))
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
