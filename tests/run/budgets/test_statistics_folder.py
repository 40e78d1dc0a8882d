"""The folder of statistics and losses of pruning has another name for everything that they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compressor.config.step_list import steps_of
from compressor.config.steps import Units
from compressor.progress import NullListener, RunLog
from compressor.run import prune_units
from compressor.run.load import load_model, read_rows
from compressor.run.prune_units import BudgetRun
from compressor.run.step_store import StepStore
from tests.run.runs import learning_recipe


def test_statistics_of_another_version_or_of_other_rows_are_not_read(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = learning_recipe(inputs, tmp_path / "out", keep=None, training_steps=None, macs="60%")
    (step,) = steps = steps_of(recipe)
    assert isinstance(step, Units)
    model = load_model(recipe, steps)
    costs: Any = None
    store = StepStore(tmp_path / "learning")
    data = read_rows(recipe, steps, model)
    run = BudgetRun(step, recipe, model, data, None, costs, (), 0.0, store, RunLog(NullListener()))

    def folder(**fields: Any) -> Path:
        return prune_units.statistics_folder(replace(run, step=step.model_copy(update=fields)), model.groups)

    own, shared = folder(), folder(statistics=tmp_path / "shared")
    assert (own.parent, shared.parent) == (store.pruning, tmp_path / "shared")
    assert own.name == shared.name
    others = [folder(prune_rows=9), folder(seed=1)]
    monkeypatch.setattr(prune_units, "STATISTICS_VERSION", prune_units.STATISTICS_VERSION + 1)
    assert len({own, *others, folder()}) == 4
