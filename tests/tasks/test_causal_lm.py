"""Language modelling: texts become blocks, and losses become perplexity."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from compressor.errors import ErrorCode
from compressor.model_folder import ModelFolder, load
from compressor.models.forwards import tensors_of
from compressor.results import MetricUnit
from compressor.tasks import open_data, statistics
from tests import folders
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.rows import forward_of, jsonl, text, token_ids, tsv


def test_text_becomes_blocks(gpt2: ModelFolder, tmp_path: Path) -> None:
    path = text(tmp_path / "a.txt", "one two three", "", "four five six seven")
    data = open_data(rows_config(path, path, path, max_length=3), gpt2)
    assert token_ids(data.train) == [[15, 16, 17], [18, 19, 20]]  # the last token predicts nothing
    batch = data.task.collate([data.train[0], {"input_ids": [5, 6], "attention_mask": [1, 1], "labels": [5, 6]}])
    assert batch["labels"].tolist() == [[15, 16, 17], [5, 6, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_rows_of_a_column_end_with_the_end_token(tmp_path: Path) -> None:
    tokenizer = folders.tokenizer()
    tokenizer.eos_token = "[SEP]"
    path = folders.save(folders.gpt2(), tmp_path / "model", with_tokenizer=False)
    tokenizer.save_pretrained(path)
    rows = tsv(tmp_path / "a.tsv", "0\tone two", "1\tthree")
    data = open_data(rows_config(rows, rows, rows), load(path))
    assert token_ids(data.train) == [[15, 16, 3, 17, 3]]
    alone = jsonl(tmp_path / "a.jsonl", {"text": "one two"}, {"text": "three"})
    assert token_ids(open_data(rows_config(alone, alone, alone), load(path)).train) == [[15, 16, 3, 17, 3]]
    lines = text(tmp_path / "a.txt", "one two", "three")
    assert token_ids(open_data(rows_config(lines, lines, lines), load(path)).train) == [[15, 16, 17]]


def test_perplexity_follows_from_the_loss_of_the_model(gpt2: ModelFolder, tmp_path: Path) -> None:
    path = text(tmp_path / "a.txt", *["one two three four five good bad"] * 11)
    data = open_data(rows_config(path, path, path, max_length=8), gpt2)
    measured = statistics(data.task, data.eval, forward_of(gpt2.model), 3)
    assert measured[:, 1].tolist() == [7.0] * 9 + [4.0]
    losses = []
    for row in data.eval:
        batch = data.task.collate([row])
        losses.append(gpt2.model(**tensors_of(batch)).loss.item() * (len(row["input_ids"]) - 1))
    assert measured[:, 0] == pytest.approx(losses, rel=1e-5)
    assert data.task.score(measured) == pytest.approx(math.exp(sum(losses) / measured[:, 1].sum()), rel=1e-5)
    assert (data.task.higher_is_better, data.task.metric_unit) == (False, MetricUnit.RAW)


def test_blocks_are_no_longer_than_the_model_reads(gpt2: ModelFolder, tmp_path: Path) -> None:
    path = text(tmp_path / "a.txt", *["one two three four five"] * 9)
    data = open_data(rows_config(path, path, path, max_length=999), gpt2)
    assert list(data.train["length"]) == [20, 20, 5]


def test_a_text_of_one_token_is_refused(gpt2: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.TOO_FEW_ROWS, tokens=1):
        open_data(rows_config(text(tmp_path / "a.txt", "one")), gpt2)


def test_segments_of_one_token_are_refused(gpt2: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, field="max_length", value=1, minimum=2):
        open_data(rows_config(text(tmp_path / "a.txt", "one two"), max_length=1), gpt2)


def test_two_columns_of_text_are_refused(gpt2: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "a.tsv", "one\ttwo", header="sentence1\tsentence2")
    with fails_with(ErrorCode.MISSING_VALUE, field="text_columns", value=("sentence1", "sentence2")):
        open_data(rows_config(rows), gpt2)
    with fails_with(ErrorCode.INVALID_VALUE, field="text_columns", value=("sentence1", "sentence2")):
        open_data(rows_config(rows, text_columns=("sentence1", "sentence2")), gpt2)
