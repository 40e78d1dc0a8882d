"""Runs on a machine whose PyTorch has an NVIDIA GPU (`make test-gpu`): units are ranked, refitted and trained there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compressor
from compressor.model_folder import load
from compressor.processes import on_accelerator
from tests.run.runs import learn, learning_recipe

pytestmark = pytest.mark.gpu
BUDGET: dict[str, Any] = {"keep": None, "training_steps": None, "macs": "60%"}


@pytest.fixture(autouse=True)
def _gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test allocates memory of the GPU; tests are skipped without one, unless it is required."""
    if not torch.cuda.is_available():
        if os.environ.get("COMPRESSOR_REQUIRE_GPU") and torch.version.cuda is not None:
            pytest.fail("PyTorch is built for CUDA and has no GPU")
        pytest.skip("PyTorch has no GPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = _gpu_allocations()
    yield
    assert _gpu_allocations() > before


def _gpu_allocations() -> int:
    """Number of allocations of GPU memory by this process."""
    torch.cuda.init()
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


@pytest.mark.parametrize("method", ["reconstruct", "fisher"])
@pytest.mark.parametrize("budget", [{"macs": "60%"}, {"macs": None, "max_drop": 0.3}], ids=["macs", "max_drop"])
def test_the_gpu_keeps_the_units_that_the_processor_keeps(
    method: str, budget: dict[str, Any], answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**BUDGET, **budget, "method": method}
    gpu = learn(learning_recipe(answered, tmp_path / "gpu", **fields))
    with monkeypatch.context() as without_gpu:
        without_gpu.setattr(torch.cuda, "is_available", lambda: False)
        processor = learn(learning_recipe(answered, tmp_path / "cpu", **fields))
    kept = [[group.kept for group in learned.selected.plan.groups] for learned in (gpu, processor)]
    assert kept[0] == kept[1]
    for name, weight in processor.weights.items():
        torch.testing.assert_close(gpu.weights[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {**BUDGET, "distill": True, "distill_steps": 16, "minutes": 10.0},
        {**BUDGET, "distill": True, "quantized_share": 0.5, "precision": "int8", "provider": "cpu"},
        {"macs": "60%", "keep": None, "method": "dsp"},
        {**BUDGET, "method": "magnitude"},
        {"method": "dsp"},
        {"method": "astar", "keep": None, "training_steps": None, "max_drop": 0.3},
    ],
    ids=["distill", "distill-int8", "dsp-units", "magnitude", "dsp-heads", "astar"],
)
def test_a_run_that_learns_on_the_gpu_is_proven(fields: dict[str, Any], inputs: Path, tmp_path: Path) -> None:
    report = compressor.compress(learning_recipe(inputs, tmp_path / "out", **fields))
    assert report.proofs
    assert all(proof.holds for proof in report.proofs)


def test_a_model_is_on_the_processor_again(inputs: Path) -> None:
    model = load(inputs / "model").model
    with on_accelerator(model):
        assert model.device.type == "cuda"
    assert model.device.type == "cpu"
