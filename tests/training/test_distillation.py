"""The loss of distillation: zero for the teacher itself, blind to padding and labels, and learned by training."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.config.sections import RowsConfig
from compressor.model_folder import load
from compressor.tasks import open_data
from compressor.training.distillation import Distillation
from compressor.training.schedule import Schedule
from tests import folders, zoo
from tests.language import EndOfPowerError
from tests.run.runs import write_inputs
from tests.training.runs import have_same_weights, stop_after, train_model, without_times

FAMILIES = {"bert": ("logits",), "gpt2": ("logits",), "bart": ("logits",), "vit": ("logits",)}


def changed(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A copy with other weights."""
    generator = torch.Generator().manual_seed(seed)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return copied


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_teacher_itself_has_no_loss(family: str) -> None:
    model, batch = zoo.FAMILIES[family](0)
    model.eval()
    distillation = Distillation.of(model, FAMILIES[family])
    assert distillation.loss(model, batch).item() == pytest.approx(0, abs=1e-9)
    student = changed(model).train(False)
    loss = distillation.loss(student, batch)
    loss.backward()
    assert loss.item() > 1e-4
    assert all(weight.grad is None for weight in distillation.teacher.parameters())
    assert any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in student.parameters())


def bert_batch() -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([[3, 5, 7, 0], [4, 6, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
    }


def test_labels_and_padding_have_no_influence() -> None:
    model = folders.bert().eval()
    distillation, student = Distillation.of(model, ("logits",)), changed(model).eval()
    batch = bert_batch()
    loss = distillation.loss(student, batch)
    assert distillation.loss(student, {**batch, "labels": torch.tensor([0, 1])}) == loss
    padded = {**batch, "input_ids": torch.tensor([[3, 5, 7, 2], [4, 6, 8, 9]])}
    assert distillation.loss(student, padded).item() == pytest.approx(loss.item(), rel=1e-5)


def test_the_temperature_divides_logits_and_scales_the_divergence_back() -> None:
    model = folders.bert().eval()
    student, batch = changed(model).eval(), bert_batch()
    loss = Distillation.of(model, ("logits",), temperature=3.0, hidden_weight=0.0).loss(student, batch)
    with torch.no_grad():
        p, q = ((network(**batch).logits / 3).log_softmax(-1) for network in (model, student))
    assert loss.item() == pytest.approx(9 * (p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-5)


def test_a_regression_has_the_squared_difference_over_the_variance() -> None:
    model = folders.bert(num_labels=1).eval()
    student, batch = changed(model).eval(), bert_batch()
    loss = Distillation.of(model, ("logits",), temperature=3.0, hidden_weight=0.0).loss(student, batch)
    with torch.no_grad():
        dense, logits = model(**batch).logits[:, 0], student(**batch).logits[:, 0]
    expected = (dense - logits).square().mean() / dense.var(correction=0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_weight_of_hidden_states_multiplies_their_relative_error() -> None:
    model = folders.bert().eval()
    student, batch = changed(model).eval(), bert_batch()
    none, single, double = (
        Distillation.of(model, ("logits",), hidden_weight=weight).loss(student, batch).item() for weight in (0, 1, 2)
    )
    assert single > none
    assert double - none == pytest.approx(2 * (single - none), rel=1e-4)


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    """Trains a student of a tiny teacher, with checkpoints in a folder; returns its model and log."""
    inputs = write_inputs(tmp_path)
    teacher = load(inputs / "model").model
    schedule = Schedule(
        steps=20,
        batch_size=8,
        learning_rate=5e-3,
        seed=0,
        warmup=0.1,
        weight_decay=0.0,
        max_grad_norm=1.0,
        evaluations=4,
        points=20,
        mixed_precision="no",
    )

    def train(name: str, **options: Any) -> tuple[PreTrainedModel, list[dict[str, Any]]]:
        folder = load(inputs / "model")
        folder.model.load_state_dict(changed(teacher).state_dict())
        data = open_data(RowsConfig(data=str(inputs / "rows.tsv"), max_length=8), folder)
        distillation = Distillation.of(teacher, data.task.outputs)
        log = train_model(folder, data, schedule, tmp_path / name, distillation=distillation, **options)
        return folder.model, log

    return train


def test_training_brings_a_student_closer_to_its_teacher(runs: Any) -> None:
    _, log = runs("run")
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 20
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_an_interruption_changes_nothing(runs: Any) -> None:
    whole, log = runs("whole")
    with pytest.raises(EndOfPowerError):
        runs("interrupted", on_progress=stop_after(13))
    resumed, resumed_log = runs("interrupted")
    assert have_same_weights(whole, resumed)
    assert without_times(resumed_log) == without_times(log)
