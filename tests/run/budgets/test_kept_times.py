"""Times that a run measured outlive an interruption: the same command goes on to the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import compressor
import graph_passes
from compressor.errors import BudgetError, ErrorCode
from compressor.measure import macs
from compressor.measure.costs import CostTable
from compressor.pruning import measure
from compressor.pruning.measure import CostSource
from compressor.results import NoteCode
from compressor.targets import Engine
from graph_passes import Plan
from tests.faults import fails_with
from tests.run.budgets.budget_runs import budget_recipe, codes
from tests.run.listeners import RecordingListener, interrupt


@pytest.fixture
def noisy_times(monkeypatch: pytest.MonkeyPatch) -> np.random.Generator:
    """Times in proportion to multiply-accumulates, times a random number that no two measurements share."""
    noise = np.random.default_rng(0)

    def times(engines: Sequence[Engine], *args: object) -> list[float]:
        return [
            1e-6 * float(macs(graph_passes.load(engine.path), 1, 8) or 0) * noise.uniform(0.9, 1.1)
            for engine in engines
        ]

    def tables(source: CostSource, macs: CostTable, *args: object) -> list[CostTable]:
        factor = 1e-3 * noise.uniform(0.9, 1.1)
        return [macs.scaled(factor).model_copy(update={"unit": "ms", "dense": 1e-3 * macs.dense, "seq": 8, "batch": 1})]

    monkeypatch.setattr(measure, "paired_times", times)
    monkeypatch.setattr(CostSource, "measured_tables", tables)
    return noise


@pytest.mark.zoo
@pytest.mark.parametrize("stage", ["gathering statistics", "measuring what", "timing the plan", "refitting"])
def test_an_interrupted_run_goes_on_to_the_same_plan(
    stage: str, inputs: Path, tmp_path: Path, noisy_times: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = noisy_times.bit_generator.state
    compressor.compress(budget_recipe(inputs, tmp_path / "whole", speedup=1.4))
    noisy_times.bit_generator.state = state
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache of the second run"))
    recipe = budget_recipe(inputs, tmp_path / "out", speedup=1.4)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe, RecordingListener(stage, interrupt))
    report = compressor.compress(recipe)
    assert NoteCode.RESUMED in codes(report)
    whole, resumed = (Plan.load(tmp_path / name / "plan.json") for name in ("whole", "out"))
    assert resumed.groups == whole.groups
    assert resumed.heads_kept + resumed.neurons_kept < resumed.heads + resumed.neurons


@pytest.mark.usefixtures("noisy_times")
def test_an_unreachable_time_is_refused_before_the_rows_are_read(inputs: Path, tmp_path: Path) -> None:
    listener = RecordingListener()
    with fails_with(ErrorCode.BUDGET_UNREACHABLE, BudgetError):
        compressor.compress(budget_recipe(inputs, tmp_path / "out", speedup=1000), listener)
    assert not any("statistics" in stage for stage in listener.stages)
