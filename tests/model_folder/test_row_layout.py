"""Example inputs are laid out as the rows of the task, or as the tokenizer lays out texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from compressor.model_folder import ModelFolder, example_inputs, example_rows, load
from compressor.run.load import with_row_layout
from compressor.run.products import LoadedModel
from compressor.tasks import open_data
from tests import end_token_models, folders
from tests.end_token_models import ANSWERER, MODELS


def markers(folder: ModelFolder, ids: torch.Tensor) -> list[list[str]]:
    """The special tokens of each row, without padding."""
    tokens = [folder.processor.convert_ids_to_tokens(row) for row in ids.tolist()]
    return [[token for token in row if not token.startswith("word") and token != "<pad>"] for row in tokens]


@pytest.mark.parametrize("name", MODELS)
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
    given = replace(folder, example={"input_ids": torch.tensor([[2, 9, 9, 3], [2, 8, 8, 3]] * 3)})
    rows = example_rows(given)
    assert rows.markers == {2, 3}
    assert np.array_equal(rows.inputs["input_ids"], [[2, 9, 9, 3], [2, 8, 8, 3]] * 2)
    assert example_inputs(given, 1, 6, seed=1)["input_ids"].tolist() == [[2, 8, 8, 8, 8, 3]]
