"""Short runs that distill a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import compressor
from compressor.config.run import Recipe
from compressor.model_folder import load
from compressor.results import Report
from tests.run.runs import learning_recipe

BUDGET: dict[str, Any] = {"keep": None, "training_steps": None, "macs": "60%"}


def distilled_recipe(inputs: Path, out: Path, **fields: Any) -> Recipe:
    return learning_recipe(
        inputs, out, **{**BUDGET, "distill": True, "distill_steps": 60, "distill_learning_rate": 1e-3, **fields}
    )


def run(inputs: Path, out: Path, **fields: Any) -> Report:
    return compressor.compress(distilled_recipe(inputs, out, **fields))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load(folder).model.named_parameters())


def have_same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
