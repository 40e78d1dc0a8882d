"""The folder of statistics and losses of pruning has another name for everything that they depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressor.config.step_list import steps_of
from compressor.config.steps import Units
from compressor.run.load import load_model, read_rows
from compressor.run.steps.units import statistics_folder
from tests.run.runs import learning_recipe


def test_statistics_of_other_rows_are_not_read(inputs: Path, tmp_path: Path) -> None:
    recipe = learning_recipe(inputs, tmp_path / "out", keep=None, training_steps=None, macs="60%")
    (step,) = steps = steps_of(recipe)
    assert isinstance(step, Units)
    model = load_model(recipe, steps)
    data = read_rows(recipe, steps, model)

    def folder(**fields: Any) -> Path:
        changed = step.model_copy(update=fields)
        return statistics_folder(changed, model, data, model.groups, tmp_path / "statistics")

    assert folder().parent == tmp_path / "statistics"
    assert len({folder(), folder(prune_rows=9), folder(seed=1)}) == 3
