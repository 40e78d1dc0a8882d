"""A compacted model is trained with checkpoints as the gated model is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compressor.config.sections import RowsConfig
from compressor.model_folder import load
from compressor.tasks import open_data
from compressor.units import compacted, find_groups, gated
from graph_passes import Plan
from tests.language import EndOfPowerError
from tests.run.runs import write_inputs
from tests.training.runs import have_same_weights, stop_after, train_model
from tests.training.students import schedule

Context = Callable[[PreTrainedModel, Plan], AbstractContextManager[Any]]


def in_smaller_linears(model: PreTrainedModel, plan: Plan) -> AbstractContextManager[Any]:
    return compacted(model, plan, inputs())


def inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[3, 5, 7, 2], [4, 6, 8, 9]])}


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    """Trains a tiny model of which every other unit is dropped, without dropout; returns the model."""
    folders = write_inputs(tmp_path)

    def train(name: str, context: Context, **options: Any) -> PreTrainedModel:
        folder = load(folders / "model")
        for module in folder.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        plan = Plan(groups=tuple(group.plan(range(0, group.units, 2)) for group in find_groups(folder.model, inputs())))
        data = open_data(RowsConfig(data=str(folders / "rows.tsv"), max_length=8), folder)
        with context(folder.model, plan):
            train_model(folder, data, schedule(8, evaluations=2, points=4), tmp_path / name, **options)
        return folder.model

    return train


def test_training_in_smaller_linears_gives_the_weights_of_gated_training(runs: Any) -> None:
    smaller, full = runs("smaller", in_smaller_linears), runs("full", gated)
    for actual, expected in zip(smaller.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.zoo
def test_an_interruption_changes_nothing(runs: Any) -> None:
    whole = runs("whole", in_smaller_linears)
    with pytest.raises(EndOfPowerError):
        runs("interrupted", in_smaller_linears, on_progress=stop_after(6))
    assert have_same_weights(whole, runs("interrupted", in_smaller_linears))
