"""A tiny teacher, students that start from other weights, and their distillation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from compressor.config.sections import RowsConfig
from compressor.model_folder import load
from compressor.tasks import open_data
from compressor.training.distillation import Distillation
from compressor.training.schedule import Schedule
from tests.training.runs import Log, train_model


def schedule(steps: int, **fields: Any) -> Schedule:
    """A schedule of eight rows a step, with a point in every step."""
    tiny: dict[str, Any] = {
        "batch_size": 8,
        "learning_rate": 5e-3,
        "seed": 0,
        "warmup": 0.1,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "evaluations": 4,
        "points": steps,
        "mixed_precision": "no",
    }
    return Schedule(steps=steps, **{**tiny, **fields})


def changed(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A copy with other weights."""
    generator = torch.Generator().manual_seed(seed)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return copied


def distil(
    inputs: Path,
    checkpoints: Path,
    schedule: Schedule,
    *,
    prepare: Callable[[PreTrainedModel], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> tuple[PreTrainedModel, Log]:
    """Train a student with other weights than its teacher; returns the student and the log.

    Args:
        inputs: folder of `write_inputs`.
        checkpoints: folder of the checkpoints.
        schedule: length and learning rate.
        prepare: a context around the training, of the student.
        options: further arguments of `fit`.
    """
    folder, teacher = load(inputs / "model"), load(inputs / "model").model
    folder.model.load_state_dict(changed(teacher).state_dict())
    data = open_data(RowsConfig(data=str(inputs / "rows.tsv"), max_length=8), folder)
    distillation = Distillation.of(teacher, data.task.outputs)
    with prepare(folder.model):
        log = train_model(folder, data, schedule, checkpoints, distillation=distillation, **options)
    return folder.model, log
