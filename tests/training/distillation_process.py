"""Distilling a tiny model, alone or in one of several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import PartialState

from compressor.training.checkpoints import digest
from tests.training.students import distil, schedule


def values_of(folder: Path, name: str, batch_size: int) -> dict[str, Any]:
    """Losses, divergences and weights of a short distillation."""
    settings = {"batch_size": batch_size, "learning_rate": 2e-3, "evaluations": 2}
    student, log = distil(folder, folder / name, schedule(8, **settings))
    return {
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "divergences": [entry["eval_divergence"] for entry in log if "eval_divergence" in entry],
        "weights": digest(student),
    }


def distil_together(folder: Path) -> dict[str, Any]:
    """The result of one of several processes."""
    return {**values_of(folder, "together", 4), "processes": PartialState(cpu=True).num_processes}
