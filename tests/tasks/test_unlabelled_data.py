"""Further training rows without labels, beside rows of the task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compressor.errors import ErrorCode
from compressor.model_folder import ModelFolder, load
from compressor.results import NoteCode
from compressor.tasks import Data, open_data
from compressor.tasks import data as data_module
from tests import folders
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.rows import labelled_rows, text, token_ids, tsv
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
