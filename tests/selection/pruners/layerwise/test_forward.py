"""Arguments of forwards, and which tokens are padding."""

from __future__ import annotations

import torch

from compressor.selection.pruners.layerwise.forward import token_mask
from compressor.tasks.forwards import forward_arguments, scored_mask
from tests.zoo import FAMILIES, text

ENCODER, DECODER = "model.encoder.layers.0.fc2", "model.decoder.layers.0.fc2"


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
