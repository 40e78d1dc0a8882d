"""Example inputs run, look like those of the tokenizer, and respect the limits of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

from compressor.errors import ErrorCode
from compressor.model_folder import example_feeds, example_feeds_by_size, example_inputs, load
from tests import folders
from tests.faults import fails_with
from tests.zoo import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_example_inputs_run(family: str, tmp_path: Path) -> None:
    model, _ = FAMILIES[family](0)
    folder = load(folders.save(model, tmp_path, with_tokenizer=False), needs_processor=False)
    inputs = example_inputs(folder, 3, 8)
    assert all(value.shape[0] == 3 for value in inputs.values())
    for name, value in inputs.items():
        if name.endswith("ids"):
            assert (value.dtype, value.shape[1]) == (torch.int64, 8)
    if "attention_mask" in inputs:
        assert inputs["attention_mask"].sum(-1).tolist() == [8, 8, 6]
    with torch.no_grad():
        assert torch.isfinite(next(iter(folder.model(**inputs).values()))).all()
    again, reseeded = example_inputs(folder, 3, 8), example_inputs(folder, 3, 8, seed=1)
    assert all(torch.equal(inputs[name], again[name]) for name in inputs)
    assert any(not torch.equal(inputs[name], reseeded[name]) for name in inputs)


def test_inputs_of_an_engine_are_those_of_the_model(saved: Path) -> None:
    folder = load(saved)
    feeds = example_feeds_by_size(folder, [(3, 8), (1, None)])
    assert list(feeds) == [(3, 8), (1, None)]
    for (batch, seq), by_name in feeds.items():
        inputs = example_inputs(folder, batch, seq or 1)
        assert by_name.keys() == inputs.keys() == example_feeds(folder, batch, seq).keys()
        assert all(torch.equal(torch.from_numpy(by_name[name]), value) for name, value in inputs.items())


def test_example_inputs_resemble_those_of_the_tokenizer(saved: Path) -> None:
    inputs = example_inputs(load(saved), 2, 8)
    assert list(inputs) == ["input_ids", "attention_mask", "token_type_ids"]
    ids, special = inputs["input_ids"], len(folders.SPECIAL_TOKENS)
    layouts = [[2, None, None, 3, None, None, None, 3], [2, None, None, 3, None, 3, 0, 0]]
    assert [[token if token < special else None for token in row] for row in ids.tolist()] == layouts
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0, 0]]


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3)])
def test_example_inputs_of_any_size(saved: Path, batch: int, seq: int) -> None:
    folder = load(saved)
    inputs = example_inputs(folder, batch, seq)
    assert inputs["input_ids"].shape == (batch, seq)
    assert inputs["attention_mask"].sum(-1).min() >= 1
    folder.model(**inputs)


def test_a_language_model_that_classifies_gets_a_padding_token(tmp_path: Path) -> None:
    path = folders.save(folders.gpt2(hf.GPT2ForSequenceClassification), tmp_path, with_tokenizer=False)
    folder = load(path, needs_processor=False)
    assert folder.config.pad_token_id == 3  # the end token
    assert folder.model(**example_inputs(folder, 3, 8)).logits.shape == (3, 2)


def test_inputs_longer_than_the_model_reads_are_refused(saved: Path, tmp_path: Path) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, field="seq", value=21, maximum=20):
        example_inputs(load(saved), 1, 21)
    roberta, _ = FAMILIES["roberta"](0)
    folder = load(folders.save(roberta, tmp_path, with_tokenizer=False), needs_processor=False)
    folder.model(**example_inputs(folder, 1, 69))
    with fails_with(ErrorCode.OUT_OF_RANGE, field="seq", value=70, maximum=69):
        example_inputs(folder, 1, 70)
