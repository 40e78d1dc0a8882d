"""Token classification: words become tokens with a label at the first piece of each, and tags are scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from compressor.errors import ErrorCode, InputError
from compressor.models.forwards import tensors_of
from compressor.results import NoteCode
from compressor.tasks import open_data, statistics
from compressor.tasks.raw_texts import read_texts
from compressor.tasks.row_files import read_rows
from compressor.tasks.token_labels import TokenClassification
from compressor.training.divergence import divergence
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.questions import WORD, byte_pieces, forward_of, wordpieces
from tests.tasks.rows import jsonl, text, tsv
from tests.tasks.tags import ROW, TAGS, conll, encode, folder_of, metaspace, sentence, task_of


def test_the_first_piece_of_a_word_has_its_tag() -> None:
    task = task_of()
    (row,) = encode(task, ROW)
    assert wordpieces().convert_ids_to_tokens(row["input_ids"]) == ["[CLS]", "who", "x", "##y", "paris", "[SEP]"]
    assert row["labels"] == [-100, 0, 1, -100, 2, -100]
    assert row["length"] == 6


@pytest.mark.parametrize("tokenizer", [wordpieces(), byte_pieces(), metaspace()], ids=["words", "bytes", "spaces"])
@settings(max_examples=15, deadline=None)
@given(words=st.lists(WORD, min_size=1, max_size=4))
def test_words_have_the_tokens_of_their_text(tokenizer: PreTrainedTokenizerFast, words: list[str]) -> None:
    task = task_of(tokenizer, max_length=60)
    (row,) = task.encode_unlabelled(Dataset.from_list([{"words": words}]), "rows")
    assert row["input_ids"] == tokenizer(" ".join(words))["input_ids"]
    assert [label for label in row["labels"] if label != -100] == [0] * len(words)
    first = row["labels"].index(0)
    assert all(token in tokenizer.all_special_ids for token in row["input_ids"][:first])


def test_batches_are_padded() -> None:
    task = task_of()
    batch = task.collate(list(encode(task, ROW, {"words": ["rome"], "tags": ["B-LOC"]})))
    assert batch["labels"].tolist() == [[-100, 0, 1, -100, 2, -100], [-100, 1, -100, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0] * 6] * 2


@pytest.mark.parametrize(("metric", "counts"), [("f1", [[2, 3, 2], [0, 0, 1]]), ("accuracy", [[2, 3], [0, 1]])])
def test_tags_are_scored_at_first_pieces(metric: str, counts: list[list[int]]) -> None:
    task = task_of(metric=metric)
    tags = ["B-LOC", "O", "B-NUM"]
    batch = task.collate(list(encode(task, {**ROW, "tags": tags}, {"words": ["rome"], "tags": ["B-LOC"]})))
    logits = np.zeros((*batch["labels"].shape, len(TAGS)))
    logits[0, [1, 2, 4], [1, 3, 3]] = 1  # the tag of the second word is wrong
    logits[0, 3, 1] = logits[1, 2, 1] = 9  # a further piece and a special token do not count
    assert task.per_example(logits, batch["labels"]).tolist() == counts


def test_a_model_is_scored_in_batches(tmp_path: Path) -> None:
    folder = folder_of()
    rows = conll(tmp_path / "rows.conll", *(sentence(seed) for seed in range(12)))
    data = open_data(rows_config(rows, rows, rows), folder)
    folder.model.eval()
    singly, together = (statistics(data.task, data.test, forward_of(data.task, folder.model), size) for size in (1, 5))
    assert np.array_equal(singly, together)
    assert singly.shape == (12, 3)
    assert 0 <= data.task.score(singly) <= 1
    assert (data.task.metric, data.task.metric_heading) == ("f1", "f1, %")


@pytest.mark.parametrize("column", ["tags", "ner_tags", "labels"])
def test_tags_are_names_or_numbers(column: str, tmp_path: Path) -> None:
    task = task_of()
    names = encode(task, {"tokens": ROW["words"], column: ROW["tags"]})["labels"]
    assert encode(task, {"tokens": ROW["words"], column: [0, 1, 2]})["labels"][:] == names[:]
    rows = jsonl(tmp_path / "a.jsonl", *({"tokens": ROW["words"], column: ROW["tags"]} for _ in range(2)))
    assert open_data(rows_config(rows, rows, rows), folder_of()).test["labels"][0] == names[0]


def test_numbers_of_a_data_set_are_read_by_their_names(tmp_path: Path) -> None:
    features = {"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=["B-LOC", "I-LOC", "O"]))}
    rows = Dataset.from_dict({"tokens": [ROW["words"]], "ner_tags": [[2, 0, 1]]}, Features(features))
    assert task_of().encode(rows, "rows")["labels"][0] == [-100, 0, 1, -100, 2, -100]


def test_words_beyond_the_length_are_counted() -> None:
    task = task_of(max_length=6)
    (row,) = encode(task, {"words": ["xy", "rome", "xy", "the", "river"], "tags": ["O", "B-LOC", "O", "O", "O"]})
    assert row["labels"] == [-100, 0, -100, 1, 0, -100]
    (note,) = (note for note in task.notes if note.code is NoteCode.WORDS_CUT)
    assert "2 words" in note.text


def test_rows_without_tags_are_words_or_texts(tmp_path: Path) -> None:
    labelled = conll(tmp_path / "test.conll", *(sentence(seed) for seed in range(4)))
    words = jsonl(tmp_path / "words.jsonl", {"words": ["who", "xy"]}, {"words": ["rome"]})
    data = open_data(rows_config(words, labelled, labelled), folder_of(), drawn_rows=2)
    assert NoteCode.ROWS_UNLABELLED in {note.code for note in data.notes}
    assert data.train["labels"][:] == [[-100, 0, 0, -100, -100], [-100, 0, -100]]
    texts = text(tmp_path / "texts.txt", "who xy", "rome")
    data = open_data(rows_config(texts, labelled, labelled), folder_of(), drawn_rows=2)
    assert data.train["labels"][:] == [[-100, 0, 0, 0, -100], [-100, 0, -100]]


def test_divergence_is_taken_at_labelled_tokens() -> None:
    task = task_of()
    batch = tensors_of(task.collate(list(encode(task, ROW))))
    dense = torch.randn(1, 6, len(TAGS), generator=torch.Generator().manual_seed(0))
    changed = dense.clone()
    changed[0, [0, 3, 5]] += torch.arange(len(TAGS))
    assert divergence({"logits": dense}, {"logits": changed}, task.loss_outputs, batch).item() == 0
    changed[0, 4] += torch.arange(len(TAGS))
    assert divergence({"logits": dense}, {"logits": changed}, task.loss_outputs, batch).item() > 0


def test_words_are_joined_to_texts_for_a_check(tmp_path: Path) -> None:
    file = conll(tmp_path / "rows.conll", {"words": ["who", "xy"], "tags": ["O", "O"]})
    assert read_texts(file, (), 1) == [("who xy",)]


def test_a_check_prefers_texts_to_their_tokens(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", {"text": "who xy", "tokens": ["who", "##x"]})
    assert read_texts(file, (), 1) == [("who xy",)]
    assert read_texts(file, ("tokens",), 1) == [("who ##x",)]


@pytest.mark.parametrize(
    ("row", "code", "details"),
    [
        ({"words": ["who"], "tags": ["B-PER"]}, ErrorCode.LABEL_MISMATCH, {"column": "tags", "value": "B-PER"}),
        ({"words": ["who"], "tags": [4]}, ErrorCode.LABEL_MISMATCH, {"column": "tags", "value": 4}),
        ({"words": ["who"], "tags": [-1]}, ErrorCode.LABEL_MISMATCH, {"column": "tags", "value": -1}),
        ({"words": ["who", "in"], "tags": ["O"]}, ErrorCode.INVALID_ROWS, {"column": "tags"}),
        ({"words": ["who"], "tags": ["O", "O"]}, ErrorCode.INVALID_ROWS, {"column": "tags"}),
        ({"words": ["who"], "tags": None}, ErrorCode.INVALID_ROWS, {"column": "tags"}),
        ({"words": ["who", ""], "tags": ["O", "O"]}, ErrorCode.INVALID_ROWS, {"column": "words"}),
        ({"words": ["who", "\u200b"], "tags": ["O", "O"]}, ErrorCode.INVALID_ROWS, {"column": "words"}),
        ({"words": ["who", None], "tags": ["O", "O"]}, ErrorCode.INVALID_ROWS, {"column": "words"}),
        ({"words": [], "tags": []}, ErrorCode.INVALID_ROWS, {"column": "words"}),
        ({"words": None, "tags": ["O"]}, ErrorCode.INVALID_ROWS, {"column": "words"}),
    ],
)
def test_invalid_rows_are_named(row: dict[str, Any], code: ErrorCode, details: dict[str, Any]) -> None:
    numeric = isinstance((row["tags"] or [None])[0], int)
    valid = {"words": ["who"], "tags": [0] if numeric else ["O"]}
    with fails_with(code, row=2, **details):
        encode(task_of(), valid, row)


WORDS_CELL = st.none() | st.text(max_size=4) | st.lists(st.none() | WORD | st.text(max_size=4), max_size=4)
TAGS_CELL = (
    st.none() | st.lists(st.sampled_from((*TAGS, "B-PER")), max_size=4) | st.lists(st.integers(-1, 4), max_size=4)
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.fixed_dictionaries({"words": WORDS_CELL, "tags": TAGS_CELL}), min_size=1, max_size=3))
def test_any_rows_are_encoded_or_give_one_error(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = Path(jsonl(tmp_path / "a.jsonl", *rows))
    try:
        encoded = task_of(metric="accuracy", max_length=60).encode(read_rows([path])[0], "a")
    except InputError as error:
        message, code = str(error), error.code
    else:
        scored = [sum(label != -100 for label in labels) for labels in encoded["labels"]]
        assert scored == [len(row["words"]) for row in rows]
        return
    assert "\n" not in message
    assert code is not ErrorCode.UNSPECIFIED


def test_tags_need_words(tmp_path: Path) -> None:
    with fails_with(ErrorCode.COLUMN_MISSING, field="text_columns"):
        open_data(rows_config(jsonl(tmp_path / "a.jsonl", {"tags": ["O"]}, {"tags": ["O"]})), folder_of())
    with fails_with(ErrorCode.COLUMN_MISSING, field="text_columns", value=("text",)):
        file = jsonl(tmp_path / "b.jsonl", {"text": "who", "tags": ["O"]})
        open_data(rows_config(file, text_columns=("text",)), folder_of())


def test_numbers_are_whole() -> None:
    with fails_with(ErrorCode.LABEL_MISMATCH, column="tags", row=1, value=0.5):
        encode(task_of(), {"words": ["who"], "tags": [0.5]})


def test_tags_are_lists(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"words": ["who"], "tags": "O"})
    with fails_with(ErrorCode.INVALID_ROWS, column="tags", row=1):
        open_data(rows_config(file), folder_of())


def test_scored_rows_need_tags(tmp_path: Path) -> None:
    with fails_with(ErrorCode.COLUMN_MISSING, field="label_column"):
        rows = tsv(tmp_path / "a.tsv", "who", "in", header="text")
        open_data(rows_config(rows, test_data=rows), folder_of(), drawn_rows=2)


def test_texts_without_tokens_are_left_out(tmp_path: Path) -> None:
    labelled = conll(tmp_path / "test.conll", *(sentence(seed) for seed in range(4)))
    texts = text(tmp_path / "texts.txt", "who", "", "in")
    data = open_data(rows_config(texts, labelled, labelled), folder_of(), drawn_rows=2)
    assert len(data.train) == 2
    assert NoteCode.ROWS_LEFT_OUT in {note.code for note in data.notes}
    with fails_with(ErrorCode.TOO_FEW_ROWS, column="text"):
        task_of().encode_unlabelled(Dataset.from_dict({"text": [" ", ""]}), "rows")


def test_a_tokenizer_without_words_is_refused() -> None:
    class Slow:
        is_fast = False

    with fails_with(ErrorCode.UNSUPPORTED_MODEL, tokenizer="Slow"):
        task_of(Slow())


def test_numbers_of_tags_have_no_gaps() -> None:
    folder = folder_of()
    folder.config.id2label = {0: "O", 1: "B-LOC", 3: "I-LOC"}
    with fails_with(ErrorCode.LABEL_MISMATCH, field="id2label"):
        TokenClassification(folder, rows_config(), TokenClassification.metrics[0])


def test_f1_needs_tags_of_entities() -> None:
    with fails_with(ErrorCode.LABEL_MISMATCH, field="metric", value="NN"):
        task_of(tags=("NN", "VB"))
    assert task_of(tags=("NN", "VB"), metric="accuracy").metric == "accuracy"


def test_f1_needs_entities(tmp_path: Path) -> None:
    rows = [{"words": ["who"], "tags": ["O"]}] * 2
    with fails_with(ErrorCode.INVALID_ROWS, column="tags", value="O"):
        encode(task_of(), *rows)
    assert len(encode(task_of(metric="accuracy"), *rows)) == 2


def test_words_need_room() -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, field="max_length", value=2, minimum=3):
        task_of(max_length=2)
