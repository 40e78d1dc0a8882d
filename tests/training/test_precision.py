"""The precision of matrix products, and weights that change under it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compressor.selection.pruners.layerwise.torch_network import PartialKL, with_weight
from compressor.training import precision as precisions
from compressor.training.precision import native_autocast, native_precision
from tests.zoo import FAMILIES

CPU = torch.device("cpu")


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that computes bfloat16 natively."""
    monkeypatch.setattr(precisions, "bfloat16_instructions", lambda: ("amx_bf16",))


@pytest.mark.parametrize(("flags", "precision"), [("amx_bf16 avx2", "bf16"), ("avx512_bf16", "bf16"), ("avx2", "no")])
def test_bfloat16_is_used_where_a_processor_multiplies_it(
    flags: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"flags\t\t: {flags}\n")
    assert native_precision() == precision


def test_a_device_without_native_bfloat16_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precisions, "bfloat16_instructions", lambda: ())
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    with native_autocast(CPU):
        assert linear(x).dtype == torch.float32


@pytest.mark.usefixtures("bfloat16")
def test_weights_of_other_types_are_computed_in_as_they_are() -> None:
    linear, x = nn.Linear(3, 2).half(), torch.randn(4, 3).half()
    with native_autocast(CPU, torch.float16):
        assert linear(x).dtype == torch.float16


@pytest.mark.usefixtures("bfloat16")
def test_weights_that_change_between_forwards_are_used() -> None:
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.no_grad(), native_autocast(CPU):
        before = linear(x)
        with with_weight(linear, 2 * linear.weight, 2 * linear.bias):
            changed = linear(x)
    assert before.dtype == torch.bfloat16
    torch.testing.assert_close(changed, 2 * before)


@pytest.mark.usefixtures("bfloat16")
def test_divergences_are_those_of_float32_but_for_rounding() -> None:
    model, batch = FAMILIES["bert"](0)
    linear = next(name for name, module in model.named_modules() if name.endswith("output.dense"))
    weight = model.get_parameter(f"{linear}.weight").detach().clone()
    weight[:, ::2] = 0
    expected = PartialKL(model, [batch], ("logits",)).mean(linear, weight)
    with native_autocast(CPU):
        divergence = PartialKL(model, [batch], ("logits",)).mean(linear, weight)
    assert divergence == pytest.approx(expected, rel=0.05, abs=1e-4)
    assert divergence != expected
