"""Linears that round: few values, gradients that pass, and nothing left behind."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compressor.training.fake_quantization import Rounding, fake_quantized
from compressor.units import compacted, find_groups
from compressor.units.layers import linear_weight
from graph_passes import Plan
from tests.language import EndOfPowerError
from tests.run.runs import write_inputs
from tests.training.runs import Log, have_same_weights, stop_after, without_times
from tests.training.students import distil, schedule


@pytest.mark.parametrize("layer", [torch.nn.Linear(8, 5), Conv1D(5, 8)])
@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_outputs_are_near_the_exact_ones_also_beside_outliers(layer: torch.nn.Module, outlier: float) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 7, 8)
    inputs[..., 2] *= outlier
    exact = layer(inputs)
    model = torch.nn.Sequential(layer)
    with fake_quantized(model, lambda: True):
        rounded = model(inputs)
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < error < 0.03
    torch.testing.assert_close(model(inputs), exact, rtol=0, atol=0)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("layer", [torch.nn.Linear(8, 5), Conv1D(5, 8)])
def test_factors_round_to_bfloat16_with_the_gradient_of_floats(layer: torch.nn.Linear | Conv1D) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 8, requires_grad=True)
    model = torch.nn.Sequential(layer)
    with fake_quantized(model, lambda: True, weight_levels=None):
        rounded = model(inputs)
    weight: torch.Tensor = linear_weight(layer)
    features, weights = (tensor.detach().to(torch.bfloat16).float() for tensor in (inputs, weight))
    torch.testing.assert_close(rounded, torch.nn.functional.linear(features, weights, layer.bias))
    (gradient,) = torch.autograd.grad(rounded.sum(), [inputs])
    torch.testing.assert_close(gradient, weight.detach().sum(0).expand_as(gradient), rtol=0.01, atol=0.01)


def test_gradients_pass_and_an_inactive_context_changes_nothing() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 5)
    model, inputs = torch.nn.Sequential(linear), torch.randn(4, 8, requires_grad=True)
    with fake_quantized(model, lambda: False):
        exact = model(inputs)
    torch.testing.assert_close(exact, model(inputs), rtol=0, atol=0)
    expected = torch.autograd.grad(exact.sum(), [inputs, linear.weight])
    with fake_quantized(model, lambda: True):
        rounded = torch.autograd.grad(model(inputs).sum(), [inputs, linear.weight])
    for actual, gradient in zip(rounded, expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("inputs", [torch.zeros(2, 3), torch.zeros(0, 3)])
def test_inputs_of_zeros_and_of_no_rows_are_exact(inputs: torch.Tensor) -> None:
    linear = torch.nn.Linear(3, 2)
    model = torch.nn.Sequential(linear)
    with fake_quantized(model, lambda: True):
        torch.testing.assert_close(model(inputs), linear.bias.expand(len(inputs), 2))


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    """Distils a compacted tiny model whose linears round in the last steps; returns its model and log."""
    inputs = write_inputs(tmp_path)
    example = {"input_ids": torch.tensor([[3, 5, 7, 2], [4, 6, 8, 9]])}

    def halved(model: PreTrainedModel) -> AbstractContextManager[Any]:
        plan = Plan(groups=tuple(group.plan(range(0, group.units, 2)) for group in find_groups(model, example)))
        return compacted(model, plan, example)

    def train(name: str, first_step: int | None, **options: Any) -> tuple[PreTrainedModel, Log]:
        rounding = None if first_step is None else Rounding(first_step)
        return distil(inputs, tmp_path / name, schedule(8), prepare=halved, rounding=rounding, **options)

    return train


@pytest.mark.zoo
def test_only_checkpoints_of_steps_that_round_count(runs: Any) -> None:
    (_, exact), (model, log) = runs("exact", None), runs("rounded", 4)
    chosen = {entry["step"]: entry["eval_chosen"] for entry in log if "eval_chosen" in entry}
    divergences = [
        {entry["step"]: entry["eval_divergence"] for entry in entries if "eval_divergence" in entry}
        for entries in (exact, log)
    ]
    assert {step for step, value in chosen.items() if value == float("-inf")} == {2}
    assert divergences[0][2] == divergences[1][2]
    assert divergences[0][4] != divergences[1][4]
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


@pytest.mark.zoo
def test_an_interruption_changes_nothing(runs: Any) -> None:
    whole, log = runs("whole", 4)
    with pytest.raises(EndOfPowerError):
        runs("interrupted", 4, on_progress=stop_after(7))
    resumed, resumed_log = runs("interrupted", 4)
    assert have_same_weights(whole, resumed)
    assert without_times(resumed_log) == without_times(log)
