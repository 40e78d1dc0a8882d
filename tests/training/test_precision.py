"""The precision of matmuls, and weights that change under it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.families_tiny import tiny_model
from compressor.selection.pruners.layerwise.torch_network import PartialKL, with_weight
from compressor.training import precision as precisions
from compressor.training.precision import autocast, native_precision, usable_precision
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
    model, batch = FAMILIES["bert"](0)
    monkeypatch.setattr(precisions, "bfloat16_instructions", lambda: ())
    assert usable_precision(model, batch) == "no"


@pytest.mark.usefixtures("bfloat16")
def test_bfloat16_is_used_where_a_model_runs_in_it() -> None:
    model, batch = FAMILIES["bert"](0)
    assert usable_precision(model, batch) == "bf16"
    assert usable_precision(model.half(), batch) == "no"
    deberta = tiny_model("deberta")
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "attention_mask": torch.ones(2, 4, dtype=torch.int64)}
    deberta(**batch)
    assert usable_precision(deberta, batch) == "no", "its smallest number in float32 is none in bfloat16"


def test_weights_that_change_between_forwards_are_used() -> None:
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.no_grad(), autocast(CPU, "bf16"):
        before = linear(x)
        with with_weight(linear, 2 * linear.weight, 2 * linear.bias):
            changed = linear(x)
    assert before.dtype == torch.bfloat16
    torch.testing.assert_close(changed, 2 * before)


def test_divergences_are_those_of_float32_but_for_rounding() -> None:
    model, batch = FAMILIES["bert"](0)
    linear = next(name for name, module in model.named_modules() if name.endswith("output.dense"))
    weight = model.get_parameter(f"{linear}.weight").detach().clone()
    weight[:, ::2] = 0
    expected = float(PartialKL(model, [batch], ("logits",)).rows(linear, weight).mean())
    with autocast(CPU, "bf16"):
        divergence = float(PartialKL(model, [batch], ("logits",)).rows(linear, weight).mean())
    assert divergence == pytest.approx(expected, rel=0.05, abs=1e-4)
    assert divergence != expected
