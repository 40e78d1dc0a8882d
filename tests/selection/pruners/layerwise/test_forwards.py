"""Inputs of linears without padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.models.forwards import forward_arguments, scored_mask
from compressor.selection.pruners.layerwise.layer_run import collect_inputs, count_tokens, token_mask
from compressor.selection.pruners.layerwise.output_sensitivity import sensitivity_of
from compressor.selection.pruners.layerwise.refit import CallTokens
from tests.selection.pruners.reconstruct.shared import CASES, bert, linears_in_layers, with_more_padding
from tests.unchanged import unchanged
from tests.zoo import FAMILIES, text

LINEAR = "bert.encoder.layer.1.output.dense"
ENCODER, DECODER = "model.encoder.layers.0.fc2", "model.decoder.layers.0.fc2"


def gram(batch: dict[str, Tensor]) -> Tensor:
    """X'X of the inputs of one linear, weighted."""
    model, total = bert(2), torch.zeros(44, 44)
    (weights,) = sensitivity_of(model, [batch], [LINEAR], ("logits",)).weights

    def add(call: CallTokens) -> None:
        x, weight = call.inputs, weights[LINEAR][call.number][call.mask]
        total.add_(x.T @ (x * weight[:, None]))

    with unchanged(model):
        collect_inputs(model, batch, [LINEAR], add)
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

    def add(call: CallTokens) -> None:
        counts[call.linear] = counts.get(call.linear, 0) + len(call.inputs)

    for item in batches:
        collect_inputs(model, item, linears, add)
    with unchanged(model):
        assert count_tokens(model, batches, linears) == counts


@pytest.mark.parametrize("family", SIDES)
def test_tokens_of_each_side(family: str) -> None:
    model, batch = CASES[family]()
    linears = ends(model)
    counts: dict[str, int] = {}

    def add(call: CallTokens) -> None:
        assert int(call.mask.sum()) == len(call.inputs)
        counts[call.linear] = counts.get(call.linear, 0) + len(call.inputs)

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


def test_labels_are_passed_only_where_the_decoder_needs_them() -> None:
    bart, batch = FAMILIES["bart"](0)
    labels = batch["decoder_input_ids"]
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert forward_arguments(bart, {**source, "labels": labels}).keys() == {*source, "labels", "use_cache"}
    assert forward_arguments(bart, {**batch, "labels": labels}).keys() == {*batch, "use_cache"}
    bert, _ = FAMILIES["bert"](0)
    assert forward_arguments(bert, {**text(), "labels": torch.zeros(3)}).keys() == text().keys()


def test_labels_tell_the_padding_of_a_decoder() -> None:
    model, batch = FAMILIES["bart"](0)
    labels = torch.tensor([[7, 8, -100]] * 3)
    inputs = {"attention_mask": batch["attention_mask"], "labels": labels}
    assert torch.equal(token_mask(model, DECODER, inputs, torch.Size([3, 3])), labels != -100)
    assert torch.equal(token_mask(model, ENCODER, inputs, torch.Size([3, 7])), batch["attention_mask"] != 0)


def test_a_decoder_without_mask_keeps_all_tokens() -> None:
    model, batch = FAMILIES["bart"](0)
    inputs = {"attention_mask": batch["attention_mask"], "decoder_input_ids": batch["input_ids"]}
    assert bool(token_mask(model, DECODER, inputs, torch.Size([3, 7])).all())


def test_a_decoder_that_reads_the_encoders_tokens_has_their_padding() -> None:
    model, batch = FAMILIES["bart"](0)
    for labels in ({}, {"labels": torch.tensor([0, 1, 0])}):
        inputs = {"attention_mask": batch["attention_mask"], **labels}
        mask = token_mask(model, DECODER, inputs, torch.Size([3, 7]))
        assert torch.equal(mask, batch["attention_mask"] != 0)
        assert not mask.all()


def test_flattened_tokens_are_recognised_and_other_shapes_kept() -> None:
    model, batch = FAMILIES["bert"](0)
    flat = token_mask(model, "bert.pooler.dense", batch, torch.Size([21]))
    assert torch.equal(flat, (batch["attention_mask"] != 0).flatten())
    assert token_mask(model, "bert.pooler.dense", batch, torch.Size([3])).tolist() == [True] * 3


def test_scored_positions_are_those_with_labels() -> None:
    labels = torch.tensor([[7, -100]])
    assert scored_mask({"labels": labels, "attention_mask": torch.ones(1, 2)}, 1, 2).tolist() == [[True, False]]
    assert scored_mask({"attention_mask": torch.tensor([[0, 1]])}, 1, 2).tolist() == [[False, True]]
    assert scored_mask({"pixel_values": torch.ones(1, 3, 2, 2)}, 1, 2).tolist() == [[True, True]]
