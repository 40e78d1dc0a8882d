"""Distilling a tiny model, alone or in one of several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from compressor.config.sections import RowsConfig
from compressor.model_folder import load
from compressor.tasks import open_data
from compressor.training.checkpoints import digest
from compressor.training.distillation import Distillation
from compressor.training.schedule import Schedule
from tests.training.runs import train_model


def distil(folder: Path, name: str, batch_size: int) -> dict[str, Any]:
    """Losses and weights of a student that starts from other weights than its teacher."""
    student = load(folder / "model")
    teacher = load(folder / "model").model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in student.model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    data = open_data(RowsConfig(data=str(folder / "rows.tsv"), max_length=8), student)
    schedule = Schedule(
        steps=8,
        batch_size=batch_size,
        learning_rate=2e-3,
        seed=0,
        warmup=0.1,
        weight_decay=0.0,
        max_grad_norm=1.0,
        evaluations=2,
        points=8,
        mixed_precision="no",
    )
    distillation = Distillation.of(teacher, data.task.outputs)
    log = train_model(student, data, schedule, folder / name, distillation=distillation)
    return {
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "divergences": [entry["eval_divergence"] for entry in log if "eval_divergence" in entry],
        "weights": digest(student.model),
    }


def distil_together(folder: Path) -> dict[str, Any]:
    """The result of one of several processes."""
    return {**distil(folder, "together", 4), "processes": PartialState(cpu=True).num_processes}
