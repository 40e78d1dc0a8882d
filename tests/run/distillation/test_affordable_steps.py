"""Steps and evaluations fit into the minutes; their times are measured without a change of the model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compressor.config.steps import Distill
from compressor.errors import ErrorCode, UsageError
from compressor.run.steps import distill
from compressor.store import Store
from compressor.training.teacher_outputs import KeptOutputs
from tests import folders
from tests.faults import fails_with

ROWS = Dataset.from_dict({"length": [1, 2, 3, 4]})


def task(*, makes_rows: bool) -> Any:
    return SimpleNamespace(
        collate=lambda rows: {"rows": np.array([row["length"] for row in rows])},
        model_inputs=lambda batch: batch,
        input_counts=lambda rows: (len(rows), sum(rows["length"])),
        vocabulary=() if makes_rows else None,
    )


class Clock:
    """A clock that stands still but for what is added to it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.mark.parametrize("gradient", [1.0, torch.inf, torch.nan])
def test_weights_keep_their_values_whatever_the_gradient(gradient: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training itself ends where a gradient is not finite, and names the cause."""
    network = folders.bert()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    monkeypatch.setattr(distill, "draw_rows", lambda data, count, seed: np.arange(4))

    sizes = []

    def loss(model: torch.nn.Module, inputs: dict[str, torch.Tensor], target: object) -> torch.Tensor:
        sizes.append(len(inputs["rows"]))
        return torch.stack([weight.mul(gradient).sum() for weight in model.parameters()]).sum()

    options = Distill(batch_size=6)
    data: Any = SimpleNamespace(task=task(makes_rows=False), train=ROWS, eval=ROWS)
    distillation: Any = SimpleNamespace(loss=loss, teach=lambda inputs: {})
    assert distill._timed_seconds(options, data, distillation, network).min() > 0
    assert set(sizes) == {6}, "the rows of a step are repeated where there are fewer"
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(weight.grad is None for weight in network.parameters())


@given(
    step=st.floats(0.01, 10),
    teaching=st.floats(0, 10),
    evaluation=st.floats(0.001, 1000),
    minutes=st.floats(0.001, 100),
    steps=st.integers(1, 5000),
    makes_rows=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_steps_and_evaluations_take_no_longer_than_the_minutes(
    step: float, teaching: float, evaluation: float, minutes: float, steps: int, makes_rows: bool
) -> None:
    """There are rows for two steps, which are read again and again unless further ones are made.

    Where rows are read twice, the teacher computes their outputs once.
    """
    assume(abs(step + teaching + evaluation - 60 * minutes) > 1e-6)
    clock, network = Clock(), torch.nn.Linear(1, 1)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(distill.time, "perf_counter", clock)
        patch.setattr(distill, "draw_rows", lambda data, count, seed: np.arange(4))

        def teach(inputs: object) -> dict[str, torch.Tensor]:
            clock.seconds += teaching
            return {"logits": torch.zeros(2, 1)}

        def loss(model: torch.nn.Module, inputs: object, target: object) -> torch.Tensor:
            clock.seconds += step
            return model(torch.ones(1, 1)).sum()

        def length() -> distill.TrainingLength:
            options = Distill(minutes=minutes, training_steps=steps, batch_size=2)
            data: Any = SimpleNamespace(task=task(makes_rows=makes_rows), train=ROWS, eval=ROWS)
            kept = KeptOutputs(teach, Store(Path(folder), version=1), len(data.train), 0)
            distillation = SimpleNamespace(loss=loss, teach=teach, keep_outputs=lambda *_: SimpleNamespace(kept=kept))
            work: Any = (options, data, distillation, network, Store(Path(folder), version=1))
            limit: Any = distill.affordable_length
            return limit(*work, lambda: clock.sleep(evaluation))

        if step + teaching + evaluation > 60 * minutes:
            with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field="minutes"):
                length()
            return
        result, before = length(), clock.seconds
        assert 1 <= result.steps <= steps
        assert 1 <= result.evaluations <= 12
        taught = float(result.steps)
        if result.steps >= 4:
            taught = max(2.0, result.steps / distill._READS) if makes_rows else 2.0
        spent = result.steps * step + taught * teaching + result.evaluations * evaluation
        assert spent <= 60 * minutes * (1 + 1e-6)
        assert length() == result  # an interrupted run goes on with it
        assert clock.seconds == before
