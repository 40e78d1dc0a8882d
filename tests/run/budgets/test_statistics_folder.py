"""The folder of statistics and losses of pruning has another name for everything that they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.config.step_list import steps_of
from compressor.config.steps import Units
from compressor.progress import NullListener, RunLog
from compressor.run import prune_units
from compressor.run.load import load_model, read_rows
from compressor.run.prune_units import BudgetRun
from compressor.store import Store
from tests.run.runs import learning_recipe


def test_statistics_of_other_rows_are_not_read(inputs: Path, tmp_path: Path) -> None:
    recipe = learning_recipe(inputs, tmp_path / "out", keep=None, training_steps=None, macs="60%")
    (step,) = steps = steps_of(recipe)
    assert isinstance(step, Units)
    model = load_model(recipe, steps)
    costs: Any = None
    store = Store(tmp_path / "learning" / "units")
    data = read_rows(recipe, steps, model)
    log = RunLog(NullListener())
    run = BudgetRun(step, recipe, model, data, None, costs, (), store, tmp_path / "statistics", log)

    def folder(**fields: Any) -> Path:
        return prune_units.statistics_folder(replace(run, step=step.model_copy(update=fields)), model.groups)

    assert folder().parent == tmp_path / "statistics"
    assert len({folder(), folder(prune_rows=9), folder(seed=1)}) == 3
