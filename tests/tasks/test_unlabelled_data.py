"""Further training rows without labels, beside rows of the task."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import ModelFolder, load
from compressor.results import NoteCode
from compressor.tasks import Data, open_data
from compressor.tasks import data as data_module
from compressor.tasks.squad import Answer
from compressor.tasks.unlabelled_rows import join_rows
from tests import folders
from tests.faults import fails_with
from tests.folders import WORDS, rows_config
from tests.tasks.questions import bert, row, wordpieces
from tests.tasks.rows import jsonl, labelled_rows, text, token_ids, tsv
from tests.tasks.test_sentence_similarity import HEADER, pair_rows

TEXTS = ("the plot", "not at all", "one two three four")


def opened(folder: ModelFolder, rows: str, further: str | None, **fields: str) -> Data:
    return open_data(rows_config(rows, unlabelled_data=further, **fields), folder, drawn_rows=8)


@pytest.fixture
def further(tmp_path: Path) -> str:
    return text(tmp_path / "further.txt", *TEXTS)


def test_further_rows_are_behind_the_training_rows_alone(classifier: ModelFolder, tmp_path: Path, further: str) -> None:
    rows = tsv(tmp_path / "rows.tsv", *labelled_rows(20))
    alone, data = opened(classifier, rows, None), opened(classifier, rows, further)
    assert token_ids(data.train)[: len(alone.train)] == token_ids(alone.train)
    assert token_ids(data.train)[len(alone.train) :] == classifier.processor(list(TEXTS))["input_ids"]
    assert (token_ids(data.eval), token_ids(data.test)) == (token_ids(alone.eval), token_ids(alone.test))
    assert data.train_hash != alone.train_hash
    assert (data.eval_hash, data.scores_eval) == (alone.eval_hash, True)
    assert {note.code for note in data.notes} - {note.code for note in alone.notes} == {NoteCode.ROWS_UNLABELLED}


def save_scorer(path: Path) -> Path:
    return folders.save(folders.bert(num_labels=1), path)


@pytest.mark.parametrize(
    ("save", "header", "rows"),
    [
        (save_scorer, "label\ttext", [f"{number / 2}\tgood film {number}" for number in range(12)]),
        (folders.save_sentence_encoder, HEADER, pair_rows(12)),
    ],
    ids=["numbers", "pairs"],
)
def test_further_rows_have_the_types_of_the_training_rows(
    save: Callable[[Path], Path], header: str, rows: list[str], tmp_path: Path, further: str
) -> None:
    folder, file = load(save(tmp_path / "model")), tsv(tmp_path / "rows.tsv", *rows, header=header)
    alone, data = (opened(folder, file, source, eval_data=file, test_data=file) for source in (None, further))
    assert data.train.features == alone.train.features
    assert len(data.train) == len(alone.train) + len(TEXTS)
    batch = data.task.collate([data.train[0], data.train[len(data.train) - 1]])
    length = int(batch["attention_mask"][-1].sum())
    assert batch["input_ids"][-1][:length].tolist() == folder.processor(TEXTS[-1])["input_ids"]


def test_labels_of_further_rows_are_not_read(classifier: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "rows.tsv", *labelled_rows(20))
    further = tsv(tmp_path / "further.tsv", "unknown\tgood", "\tbad film", "7\tone")
    data = opened(classifier, rows, further)
    assert data.train["labels"][-3:] == [0, 0, 0]


def test_some_of_many_further_rows_are_encoded(
    classifier: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "_CANDIDATES", 4)
    rows = tsv(tmp_path / "rows.tsv", *labelled_rows(6))
    named = rows_config(rows, rows, rows, unlabelled_data=text(tmp_path / "further.txt", *TEXTS * 10))
    data = open_data(named, classifier, drawn_rows=3)
    assert len(data.train) == 6 + 6
    assert [note.code for note in data.notes].count(NoteCode.ROWS_DRAWN) == 1


def test_the_lines_of_a_text_stand_for_a_column_of_any_name(
    classifier: ModelFolder, tmp_path: Path, further: str
) -> None:
    rows = tsv(tmp_path / "rows.tsv", *labelled_rows(20), header="label\treview")
    data = open_data(rows_config(rows, unlabelled_data=further, text_columns=("review",)), classifier, drawn_rows=8)
    assert token_ids(data.train)[-len(TEXTS) :] == classifier.processor(list(TEXTS))["input_ids"]


def test_rows_of_another_number_of_texts_are_refused(classifier: ModelFolder, tmp_path: Path, further: str) -> None:
    rows = tsv(tmp_path / "rows.tsv", *(f"{number % 2}\tgood\tfilm {number}" for number in range(20)), header=HEADER)
    with fails_with(ErrorCode.FILE_MISMATCH, field="text_columns", columns=("text",)):
        opened(classifier, rows, further)


def test_splits_that_are_not_used_are_noted(classifier: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "rows.tsv", *labelled_rows(20))
    further = tsv(tmp_path / "further.tsv", "train\tgood", "unsupervised\tbad film", header="split\ttext")
    data = opened(classifier, rows, further)
    assert [note.code for note in data.notes].count(NoteCode.SPLIT_UNUSED) == 1


def test_evaluation_rows_among_the_further_rows_are_noted(classifier: ModelFolder, tmp_path: Path) -> None:
    pairs = [f"{number % 2}\t{' '.join(words)}" for number, words in enumerate(itertools.product(WORDS, WORDS[:4]))]
    rows, scored = tsv(tmp_path / "rows.tsv", *pairs[:20]), tsv(tmp_path / "scored.tsv", *pairs[20:60])
    for source, expected in ((scored, 2), (None, 0)):  # half of the evaluation rows become test rows
        data = opened(classifier, rows, source, eval_data=scored)
        assert [note.code for note in data.notes].count(NoteCode.ROWS_REPEATED) == expected


def test_a_run_that_reads_labels_refuses_further_rows(classifier: ModelFolder, tmp_path: Path, further: str) -> None:
    rows = tsv(tmp_path / "rows.tsv", *labelled_rows(20))
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="unlabelled_data", value=further):
        open_data(rows_config(rows, unlabelled_data=further), classifier)
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="unlabelled_data", value=further):
        open_data(rows_config(test_data=rows, unlabelled_data=further), classifier, drawn_rows=8)


def test_a_task_that_needs_labels_is_named(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "model")
    wordpieces().save_pretrained(tmp_path / "model")
    folder = load(tmp_path / "model")
    rows = jsonl(tmp_path / "rows.jsonl", *(row("paris tower", "who built", Answer("paris", 0)) for _ in range(8)))
    further = jsonl(tmp_path / "further.jsonl", {"question": "who built", "context": "rome tower"})
    with fails_with(ErrorCode.COLUMN_MISSING, field="unlabelled_data"):
        opened(folder, rows, further)


def test_placeholders_have_the_form_of_the_labels() -> None:
    train = Dataset.from_dict({"input_ids": [[1, 2], [3]], "labels": [[0.0, 1.0], [1.0, 1.0]]})
    joined = join_rows(train, Dataset.from_dict({"input_ids": [[4], [5]], "labels": [0, 0]}), "further.txt")
    assert joined.features == train.features
    assert joined["input_ids"][:] == [[1, 2], [3], [4], [5]]
    assert {len(label) for label in joined["labels"]} == {2}


@pytest.mark.parametrize(
    "columns", [{"input_ids": [[1, 2]]}, {"input_ids": ["x"], "labels": [1]}, {"labels": [1]}], ids=str
)
def test_rows_that_a_task_encodes_otherwise_are_refused(columns: dict[str, list[Any]]) -> None:
    train = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [1]})
    with fails_with(ErrorCode.FILE_MISMATCH, field="unlabelled_data", source="further.txt"):
        join_rows(train, Dataset.from_dict(columns), "further.txt")


@pytest.mark.parametrize("name", ["empty.txt", "missing.txt", "further.tsv"])
def test_a_fault_of_further_rows_names_their_file(name: str, classifier: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "rows.tsv", *labelled_rows(6))
    (tmp_path / "empty.txt").touch()
    tsv(tmp_path / "further.tsv", "1\t2", header="height\twidth")
    codes = {
        "empty.txt": ErrorCode.TOO_FEW_ROWS,
        "missing.txt": ErrorCode.FILE_MISSING,
        "further.tsv": ErrorCode.COLUMN_MISSING,
    }
    with fails_with(codes[name]) as caught:
        opened(classifier, rows, str(tmp_path / name))
    assert name in str(caught.value)
