"""Texts for a model of which only the graph is available: a sentence encoder gets those that its task gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.model_folder import load
from compressor.model_folder.sentence_texts import read_sentence_texts
from compressor.tasks import open_data
from compressor.tasks.raw_texts import model_texts, read_texts, tokenize, tokenizer_of
from tests import folders
from tests.folders import rows_config
from tests.tasks.rows import tsv

PAIRS = ("3\tGOOD film\tthe bad plot", "1\tone\tone two three four five six", "0\tnot at all\tGOOD film")
SETTINGS: dict[str, Any] = {
    "sentence_bert_config": {"max_seq_length": 6, "do_lower_case": True},
    "config_sentence_transformers": {"prompts": {"text": "plot ", "query": "very "}, "default_prompt_name": "text"},
}


def task_inputs(path: Path, file: str) -> dict[str, np.ndarray]:
    """The inputs of the task for all rows of a file, padded to eight tokens."""
    data = open_data(rows_config(file, file, file), load(path))
    batch = data.task.model_inputs(data.task.collate(list(data.test)))
    return {name: np.pad(ids, ((0, 0), (0, 8 - ids.shape[1]))) for name, ids in batch.items()}


def raw_inputs(path: Path, file: str, shortest: int) -> dict[str, list[list[int]]]:
    """The inputs for all rows of a file, with only the folder of the tokenizer."""
    sentence = read_sentence_texts(path)
    rows = model_texts(read_texts(file, (), 100, sentence), sentence)
    return dict(tokenize(tokenizer_of(path), rows, sentence, shortest=shortest, longest=8))


@pytest.mark.parametrize("columns", ["sentence1\tsentence2", "query\tpassage", "anchor\tpositive"])
@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["plain", "prepared"])
def test_texts_of_pairs_are_those_of_sentence_similarity(
    settings: dict[str, Any], columns: str, tmp_path: Path
) -> None:
    path = folders.save_sentence_encoder(tmp_path / "model", **settings)
    file = tsv(tmp_path / "pairs.tsv", *PAIRS, header=f"label\t{columns}")
    expected = {name: ids.tolist() for name, ids in task_inputs(path, file).items()}
    assert len(expected["input_ids"]) == 2 * len(PAIRS)
    assert raw_inputs(path, file, 8) == expected


def test_texts_are_prepared_as_the_folder_says(tmp_path: Path) -> None:
    path = folders.save_sentence_encoder(tmp_path / "model", **SETTINGS)
    sentence = read_sentence_texts(path)
    assert model_texts([("GOOD film", "one")], sentence) == [("plot good film",), ("plot one",)]
    ids = tokenize(tokenizer_of(path), [("one " * 9,)], sentence, shortest=1, longest=8)["input_ids"]
    assert [len(row) for row in ids] == [6]


@pytest.mark.parametrize(
    ("modules", "library", "classifies"),
    [
        (["Transformer"], {}, False),
        (["Transformer", "Pooling", "Dense"], {"model_type": "CrossEncoder"}, False),
        (["Transformer", "Pooling"], {}, True),
    ],
)
def test_pairs_of_a_reranker_stay_pairs(
    modules: list[str], library: dict[str, str], classifies: bool, tmp_path: Path
) -> None:
    model = folders.bert(num_labels=1) if classifies else folders.bert_encoder()
    path = folders.save_sentence_encoder(
        tmp_path, config_sentence_transformers=library, modules=[{"path": "", "type": f"x.{name}"} for name in modules]
    )
    model.save_pretrained(path)
    assert read_sentence_texts(path) is None
    file = tsv(tmp_path / "pairs.tsv", "1\tgood\tbad film", header="label\tquery\tdocument")
    assert raw_inputs(path, file, 8) == {
        "input_ids": [[2, 5, 3, 6, 7, 3, 0, 0]],
        "token_type_ids": [[0, 0, 0, 1, 1, 1, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 1, 0, 0]],
    }


def test_texts_of_an_encoder_with_further_modules_are_prepared(tmp_path: Path) -> None:
    modules = [{"path": name, "type": f"x.{name}"} for name in ("Transformer", "Pooling", "Dense")]
    sentence = read_sentence_texts(folders.save_sentence_encoder(tmp_path, modules=modules, **SETTINGS))
    assert sentence is not None
    assert (sentence.max_tokens, sentence.lower_case, sentence.default_prompt) == (6, True, "text")


@pytest.mark.parametrize("modules", [None, 5, [5], {"type": "x.Pooling"}, [{"kind": "x.Pooling"}]], ids=str)
def test_modules_of_other_programs_are_none(modules: object, tmp_path: Path) -> None:
    assert read_sentence_texts(folders.save_sentence_encoder(tmp_path, modules=modules)) is None
