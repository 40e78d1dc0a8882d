"""Fixtures of the tests of distillation: inputs, a finished run, and a run that has only pruned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import compressor
from compressor.config.run import Recipe
from compressor.report import load as load_report
from compressor.results import Report
from tests import folders
from tests.run.distillation.distilled_runs import distilled_recipe
from tests.run.runs import Learned, learn, write_inputs
from tests.written_once import written_once


@pytest.fixture(scope="package")
def inputs() -> Path:
    """A tiny model whose answers differ from row to row, so that they can be lost; tests must not change it.

    As in a trained model, no two biases are equal, by which graphs of other exporters tell them apart.
    """
    return written_once("taught", _write_inputs)


def _write_inputs(folder: Path) -> None:
    write_inputs(folder)
    torch.manual_seed(0)
    model = folders.bert(initializer_range=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    folders.save(model, folder / "model")


@pytest.fixture(scope="package")
def distilled(inputs: Path) -> tuple[Path, Report]:
    """The output folder of a finished run, and its report."""
    run = written_once("distilled", lambda folder: compressor.compress(distilled_recipe(inputs, folder / "out")))
    return run / "out", load_report(run / "out")


@pytest.fixture(scope="package")
def pruned(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Learned]:
    """A run that is interrupted before the training, and the units and weights that it has then."""
    recipe = distilled_recipe(inputs, tmp_path_factory.mktemp("pruned") / "out")
    return recipe, learn(recipe, "training on the outputs", "units")
