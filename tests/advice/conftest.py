"""Valid inputs, of which each entry changes a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compressor.model_folder import example_inputs, load
from compressor.units import find_sites, keep_all
from tests.run.runs import write_inputs
from tests.shared_exports import shared_export
from tests.written_once import written_once


@pytest.fixture(scope="session", autouse=True)
def _exports(shared_exports: None) -> None:
    """Runs share exports."""


@pytest.fixture(scope="session")
def valid_inputs() -> Path:
    """A folder with `model`, `rows.tsv`, `plan.json`, which keeps all heads, and `dense.onnx`."""
    return written_once("valid", _write_valid)


def _write_valid(folder: Path) -> None:
    write_inputs(folder)
    model = load(folder / "model")
    batch = example_inputs(model, 2, 8)
    plan = keep_all(find_sites(model.model, batch)).model_copy(update={"model": model.fingerprint})
    plan.save(folder / "plan.json")
    shared_export(model.model, plan, batch, folder / "dense.onnx")


@pytest.fixture
def inputs(valid_inputs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(valid_inputs, tmp_path / "place")


@pytest.fixture(scope="session")
def finished_run(valid_inputs: Path) -> Path:
    """The output folder of a run that keeps one head, with the dense graph."""
    import compressor
    from tests.run.runs import learning_recipe

    def finish(folder: Path) -> None:
        compressor.compress(learning_recipe(valid_inputs, folder / "out", save_dense=True))

    return written_once("advised", finish) / "out"
