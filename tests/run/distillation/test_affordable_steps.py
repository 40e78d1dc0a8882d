"""The time of a step is measured without a change of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compressor.run.distillation import affordable_steps
from tests import folders


@pytest.mark.parametrize("gradient", [1.0, torch.inf, torch.nan])
def test_weights_keep_their_values_whatever_the_gradient(gradient: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training itself ends where a gradient is not finite, and names the cause."""
    network = folders.bert()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    monkeypatch.setattr(affordable_steps, "draw_rows", lambda data, count, seed: np.arange(4))

    def loss(model: torch.nn.Module, inputs: object) -> torch.Tensor:
        return torch.stack([weight.mul(gradient).sum() for weight in model.parameters()]).sum()

    task = SimpleNamespace(collate=lambda rows: rows, model_inputs=lambda batch: batch)
    recipe: Any = SimpleNamespace(selection=SimpleNamespace(batch_size=2, seed=0))
    data: Any = SimpleNamespace(task=task, train=list(range(4)))
    distillation: Any = SimpleNamespace(loss=loss)
    assert affordable_steps._timed_seconds(recipe, data, distillation, network) > 0
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(weight.grad is None for weight in network.parameters())
