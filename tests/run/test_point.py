"""The loss that a run allows which sets none is a point of the metric of its task."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compressor.config.run import Recipe
from compressor.model_folder import load
from compressor.run.load import with_point
from compressor.run.run_context import LoadedModel
from compressor.tasks import open_data, statistics
from tests import folders
from tests.folders import rows_config
from tests.tasks.rows import forward_of, labelled_rows, text, tsv


def test_a_point_of_a_perplexity_is_a_hundredth_of_that_of_the_whole_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = load(folders.save(folders.gpt2(), tmp_path / "model"))
    rows = text(tmp_path / "a.txt", *["one two three four five good bad"] * 30)
    data = open_data(rows_config(rows, max_length=8), folder, drawn_rows=8)
    recipe, notes = with_point(Recipe(model=folder.path, data=rows), data, LoadedModel(folder, (), (), None))
    whole = data.task.score(statistics(data.task, data.eval, forward_of(folder.model)))
    assert recipe.selection.max_drop == pytest.approx(whole / 100, rel=0.06)
    assert len(notes) == 1


def test_a_loss_that_is_set_stays(tmp_path: Path) -> None:
    folder = load(folders.save(folders.bert(), tmp_path / "model"))
    rows = tsv(tmp_path / "a.tsv", *labelled_rows(30))
    data, model = open_data(rows_config(rows), folder, drawn_rows=8), LoadedModel(folder, (), (), None)
    plain, set_by = Recipe(model=folder.path, data=rows), Recipe(model=folder.path, data=rows, max_drop=0.5)
    assert with_point(plain, data, model)[0].selection.max_drop == 0.01
    assert with_point(set_by, data, model) == (set_by, ())
