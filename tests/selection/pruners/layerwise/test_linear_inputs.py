"""Inputs of linears without padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.selection.pruners.layerwise.linear_inputs import collect_inputs, count_tokens
from compressor.selection.pruners.reconstruct.output_sensitivity import sensitivity_of
from tests.selection.pruners.reconstruct.shared import CASES, bert, linears_in_layers, with_more_padding
from tests.unchanged import unchanged
from tests.zoo import text

LINEAR = "bert.encoder.layer.1.output.dense"


def gram(batch: dict[str, Tensor]) -> Tensor:
    """X'X of the inputs of one linear, weighted."""
    model, total = bert(2), torch.zeros(44, 44)
    (weights,) = sensitivity_of(model, [batch], [LINEAR], ("logits",)).weights

    def add(name: str, x: Tensor, weight: Tensor) -> None:
        total.add_(x.T @ (x * weight[:, None]))

    with unchanged(model):
        collect_inputs(model, batch, [LINEAR], add, weights)
    return total


def test_padding_has_no_influence() -> None:
    torch.testing.assert_close(gram(text()), gram(with_more_padding(text())), rtol=1e-4, atol=1e-4)


def ends(model: PreTrainedModel) -> list[str]:
    """Linears that groups end in."""
    return [name for name in linears_in_layers(model) if name.endswith(("fc2", "output.dense", "c_proj", "ffn_output"))]


SIDES = ["bert", "gpt2", "bart", "whisper", "vit", "albert"]


@pytest.mark.parametrize("family", SIDES)
def test_tokens_are_counted_by_one_batch(family: str) -> None:
    model, batch = CASES[family]()
    linears, counts = ends(model), dict[str, int]()
    batches = [{name: value[:2] for name, value in batch.items()}, batch, batch]  # only the last row is padded

    def add(name: str, x: Tensor, weight: Tensor) -> None:
        counts[name] = counts.get(name, 0) + len(x)

    for item in batches:
        collect_inputs(model, item, linears, add)
    with unchanged(model):
        assert count_tokens(model, batches, linears) == counts


@pytest.mark.parametrize("family", SIDES)
def test_tokens_of_each_side(family: str) -> None:
    model, batch = CASES[family]()
    linears = ends(model)
    counts: dict[str, int] = {}

    def add(name: str, x: Tensor, weight: Tensor) -> None:
        assert torch.equal(weight, torch.ones(len(x)))
        counts[name] = counts.get(name, 0) + len(x)

    for _ in range(2):
        collect_inputs(model, batch, linears, add)
    expected = {
        "bert": 2 * 19,
        "gpt2": 2 * 19,
        "bart encoder": 2 * 19,
        "bart decoder": 2 * 13,
        "whisper encoder": 2 * 33,
        "whisper decoder": 2 * 13,
        "vit": 2 * 30,
        "albert": 2 * 3 * 19,
    }
    for name, count in counts.items():
        side = next((f"{family} {part}" for part in ("encoder", "decoder") if name.startswith(f"model.{part}")), family)
        assert count == expected[side], name
    assert list(counts) == [name for name in linears if name in counts]
    assert len(counts) == len(linears)
