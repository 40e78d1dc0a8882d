"""Example inputs run, look like those of the tokenizer, and respect the limits of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from compressor.errors import ErrorCode
from compressor.model_folder import (
    ModelFolder,
    example_feeds,
    example_feeds_by_size,
    example_inputs,
    example_rows,
    load,
)
from compressor.run.load import with_row_layout
from compressor.run.run_context import LoadedModel
from compressor.tasks import open_data
from compressor.units import find_sites
from tests import end_token_models, folders
from tests.end_token_models import ANSWERER, MODELS
from tests.faults import fails_with
from tests.marks import mostly_zoo
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
    assert [size[:2] for size in feeds] == [(3, 8), (1, None)]
    for (batch, seq, _), by_name in feeds.items():
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


IDS = np.arange(10, dtype=np.int32).reshape(2, 5) + 5
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def test_inputs_of_any_size_are_taken_from_the_file(saved: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", input_ids=IDS, attention_mask=MASK)
    folder = load(saved, inputs=tmp_path / "inputs.npz")
    inputs = example_inputs(folder, 3, 7)
    assert inputs["input_ids"].dtype == torch.int64
    whole, padded = [*IDS[0], *IDS[0, :2]], [*IDS[1, :3], IDS[1, 0], 0, 0, 0]
    assert inputs["input_ids"].tolist() == [whole, padded, whole]
    assert inputs["attention_mask"][1].tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert example_inputs(folder, 1, 3, seed=1)["attention_mask"].tolist() == [[1, 1, 0]]
    assert example_inputs(folder, 2, 5)["input_ids"].tolist() == IDS.tolist()
    assert find_sites(folder.model, inputs)


def test_axes_that_are_not_positions_keep_their_sizes(saved: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", inputs_embeds=np.ones((2, 5, 16)), position_ids=np.arange(5)[None].repeat(2, 0))
    inputs = example_inputs(load(saved, inputs=tmp_path / "inputs.npz"), 4, 9)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "inputs_embeds": (4, 5, 16),
        "position_ids": (4, 5),
    }
    assert inputs["inputs_embeds"].dtype == torch.float32


BAD: dict[str, tuple[Callable[[Path], object], ErrorCode]] = {
    "missing": (lambda path: None, ErrorCode.FILE_MISSING),
    "no archive": (lambda path: path.write_text("text"), ErrorCode.FILE_UNREADABLE),
    "pickled": (lambda path: np.savez(path, input_ids=np.array([{}], object)), ErrorCode.FILE_UNREADABLE),
    "empty": (lambda path: np.savez(path), ErrorCode.TENSOR_MISMATCH),
    "no such input": (lambda path: np.savez(path, input_id=IDS), ErrorCode.TENSOR_MISMATCH),
    "texts": (lambda path: np.savez(path, input_ids=np.array(["a", "b"])), ErrorCode.TENSOR_MISMATCH),
    "a scalar": (lambda path: np.savez(path, input_ids=np.array(3)), ErrorCode.TENSOR_MISMATCH),
    "other rows": (lambda path: np.savez(path, input_ids=IDS, attention_mask=MASK[:1]), ErrorCode.TENSOR_MISMATCH),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(name: str, saved: Path, tmp_path: Path) -> None:
    write, code = BAD[name]
    path = tmp_path / "inputs.npz"
    write(path)
    with fails_with(code, path=path):
        load(saved, inputs=path)


def test_inputs_that_the_model_does_not_run_on_are_one_line(saved: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", attention_mask=MASK)
    folder = load(saved, inputs=tmp_path / "inputs.npz")
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, family="bert"):
        find_sites(folder.model, example_inputs(folder, 2, 5))


def markers(folder: ModelFolder, ids: torch.Tensor) -> list[list[str]]:
    """The special tokens of each row, without padding."""
    tokens = [folder.processor.convert_ids_to_tokens(row) for row in ids.tolist()]
    return [[token for token in row if not token.startswith("word") and token != "<pad>"] for row in tokens]


@pytest.mark.parametrize("name", mostly_zoo(MODELS, "bart classifier", "t5 answerer"))
def test_a_model_that_searches_its_ids_runs_on_example_inputs(name: str, tmp_path: Path) -> None:
    folder = load(end_token_models.save(name, tmp_path))
    pair = MODELS[name][1] == ANSWERER
    texts = ("word1", "word2") if pair else ("word1",)
    expected = markers(folder, torch.tensor([folder.processor(*texts)["input_ids"]]))
    for batch, seq in ((1, 5), (3, 9), (2, 32)):
        inputs = example_inputs(folder, batch, seq, seed=batch)
        assert markers(folder, inputs["input_ids"]) == expected * batch
        with torch.no_grad():
            assert all(
                torch.isfinite(value).all() for value in folder.model(**inputs).values() if torch.is_tensor(value)
            )
    rows = example_rows(folder)
    assert rows.markers == {*folder.processor.convert_tokens_to_ids(expected[0]), folder.processor.pad_token_id}
    for seq in (6, 50):
        assert markers(folder, torch.from_numpy(rows.sized(3, seq, padded=(0,))["input_ids"])) == expected * 3


@pytest.mark.parametrize(
    ("columns", "layout"),
    [("text", "[CLS] [SEP]"), ("text,other", "[CLS] [SEP] [SEP]"), ("marked", "[CLS] <e> <e> [SEP]")],
)
def test_the_rows_of_a_task_decide_the_layout(columns: str, layout: str, tmp_path: Path) -> None:
    tokenizer = folders.tokenizer()
    tokenizer.add_tokens(["<e>"])
    config = hf.BertConfig(**{**folders.SIZES, "vocab_size": len(tokenizer)})
    path = folders.save(hf.BertForSequenceClassification(config), tmp_path / "model", with_tokenizer=False)
    tokenizer.save_pretrained(path)
    rows = tmp_path / "rows.tsv"
    lines = [f"the good film\tbad plot one\tthe <e> film <e> two\t{number % 2}" for number in range(12)]
    rows.write_text("\n".join(["text\tother\tmarked\tlabel", *lines, ""]))
    model = LoadedModel(load(path), ())
    data = open_data(folders.rows_config(str(rows), text_columns=columns.split(",")), model.folder)
    folder = with_row_layout(model, data).folder
    ids = example_inputs(folder, 2, 12, seed=3)["input_ids"]
    tokens = [folder.processor.convert_ids_to_tokens(row) for row in ids.tolist()]
    special = [token for token in tokens[0] if token.startswith(("[", "<"))]
    assert " ".join(special) == layout
    assert [token for token in tokens[1] if token.startswith(("[", "<")) and token != "[PAD]"] == special
    texts = {token for row in tokens for token in row} - set(special) - {"[PAD]"}
    assert len(texts) > 5, "the tokens between them are not those of one row"


def test_a_tokenizer_without_markers_leaves_those_of_the_configuration(tmp_path: Path) -> None:
    path = folders.save(folders.gpt2(), tmp_path, with_tokenizer=False)
    folder = load(path, needs_processor=False)
    ids = example_inputs(folder, 1, 6)["input_ids"][0].tolist()
    assert (ids[0], ids[-1]) == (2, 3)
    assert not {2, 3} & set(ids[1:-1])
    with_example = replace(folder, example={"input_ids": np.array([[2, 9, 9, 3], [2, 8, 8, 3]] * 3)})
    rows = example_rows(with_example)
    assert rows.markers == {2, 3}
    assert np.array_equal(rows.inputs["input_ids"], [[2, 9, 9, 3], [2, 8, 8, 3]] * 2)
    assert example_inputs(with_example, 1, 6, seed=1)["input_ids"].tolist() == [[2, 8, 8, 8, 8, 3]]
