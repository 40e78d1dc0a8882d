"""Rows of a run: the split of each part, and rows that are set aside."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value

from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import ModelFolder, load
from compressor.results import NoteCode
from compressor.tasks import Data, Task, open_data, training_texts
from compressor.tasks import data as data_module
from compressor.tasks.data import join_rows, rows_hash
from compressor.tasks.question_answering import Answer, QuestionAnswering
from compressor.tasks.scoring import draw_indices, draw_rows
from tests import folders
from tests.faults import fails_with
from tests.folders import WORDS, rows_config
from tests.tasks.pictures import png
from tests.tasks.questions import bert, row, wordpieces
from tests.tasks.rows import jsonl, labelled_rows, text, token_ids, tsv
from tests.tasks.test_sentence_similarity import HEADER, pair_rows

SPLITS = "split\tlabel\ttext"


def sizes(data: Data) -> list[int]:
    return [len(part) for part in (data.train, data.eval, data.test)]


def codes(data: Data) -> list[NoteCode]:
    return [note.code for note in data.notes]


def test_a_split_column_divides_the_rows(classifier: ModelFolder, tmp_path: Path) -> None:
    rows = ["train\t1\tgood", "train\t0\tbad", "dev\t1\tone", "test\t0\ttwo"]
    data = open_data(rows_config(tsv(tmp_path / "a.tsv", *rows, header=SPLITS)), classifier)
    assert sizes(data) == [2, 1, 1]
    assert codes(data) == [NoteCode.SPLIT_CHOSEN] * 2


def test_a_split_that_serves_no_purpose_is_noted(classifier: ModelFolder, tmp_path: Path) -> None:
    rows = ["train\t1\tgood", "train\t0\tbad", "dev\t1\tone", "dev\t0\tone", "holdout\t0\ttwo"]
    data = open_data(rows_config(tsv(tmp_path / "a.tsv", *rows, header=SPLITS)), classifier)
    assert sizes(data) == [2, 1, 1]
    assert codes(data).count(NoteCode.SPLIT_UNUSED) == 1


def test_training_rows_are_not_the_test_rows_of_a_file_with_one_split(classifier: ModelFolder, tmp_path: Path) -> None:
    rows = [f"test\t{number % 2}\t{'good ' * (number // 4)}{'bad ' * (number % 4)}film" for number in range(16)]
    data = open_data(rows_config(tsv(tmp_path / "a.tsv", *rows, header=SPLITS)), classifier)
    texts = [str(ids) for split in (data.train, data.eval, data.test) for ids in split["input_ids"]]
    assert len(texts) == len(set(texts)) == 16


def test_a_split_whose_labels_are_withheld_is_not_used(
    classifier: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["no", "yes"])})

    def rows(*labels: int) -> Dataset:
        return Dataset.from_dict({"sentence": ["good"] * len(labels), "label": list(labels)}, features=features)

    splits = DatasetDict({"train": rows(0, 1), "validation": rows(0, 1, 0, 1), "test": rows(-1, -1)})
    monkeypatch.setattr("compressor.tasks.splits.load_dataset", lambda *names: splits)
    data = open_data(rows_config("glue:sst2"), classifier)
    assert sizes(data) == [2, 2, 2]
    assert codes(data) == [NoteCode.SPLIT_CHOSEN, NoteCode.SPLIT_UNUSED, NoteCode.ROWS_SET_ASIDE]
    with fails_with(ErrorCode.INVALID_ROWS, column="label", value=-1):
        open_data(rows_config("glue:sst2", test_data="glue:sst2"), classifier)


@pytest.mark.parametrize("withheld", ["-1", "-1.0"])
def test_a_split_of_a_file_whose_labels_are_withheld_is_not_used(
    withheld: str, classifier: ModelFolder, tmp_path: Path
) -> None:
    labels = {"train": "01", "dev": "0101", "test": [withheld] * 2}
    rows = [f"{split}\t{label}\tgood" for split, names in labels.items() for label in names]
    data = open_data(rows_config(tsv(tmp_path / "a.tsv", *rows, header=SPLITS)), classifier)
    assert sizes(data) == [2, 2, 2]
    assert NoteCode.SPLIT_UNUSED in codes(data)


def test_a_split_whose_numbers_are_withheld_is_not_used(scorer: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*labels: float) -> Dataset:
        return Dataset.from_dict({"sentence": ["good"] * len(labels), "label": list(labels)})

    splits = DatasetDict({"train": rows(0.5, 1), "validation": rows(0, 1, 2, 3), "test": rows(-1.0, -1.0)})
    monkeypatch.setattr("compressor.tasks.splits.load_dataset", lambda *names: splits)
    assert sizes(open_data(rows_config("glue:stsb"), scorer)) == [2, 2, 2]


def test_a_file_named_for_two_purposes_is_divided_by_its_splits(classifier: ModelFolder, tmp_path: Path) -> None:
    rows = ["train\t1\tgood", "train\t0\tbad", "dev\t1\tone"]
    path = tsv(tmp_path / "a.tsv", *rows, header=SPLITS)
    data = open_data(rows_config(path, path, tsv(tmp_path / "t.tsv", "0\ttwo")), classifier)
    assert sizes(data) == [2, 1, 1]


def test_test_rows_are_set_aside_from_the_evaluation_rows(classifier: ModelFolder, tmp_path: Path) -> None:
    train, evaluation = tsv(tmp_path / "a.tsv", *labelled_rows(6)), tsv(tmp_path / "b.tsv", *labelled_rows(18))
    whole = token_ids(open_data(rows_config(train, evaluation, evaluation), classifier).eval)
    first, again, reseeded = (open_data(rows_config(train, evaluation), classifier, seed) for seed in (1, 1, 2))
    assert (len(first.eval), len(first.test)) == (9, 9)
    assert sorted(token_ids(first.eval) + token_ids(first.test)) == sorted(whole)
    assert token_ids(first.test) == token_ids(again.test) != token_ids(reseeded.test)
    assert codes(first) == [NoteCode.ROWS_SET_ASIDE]


def test_training_rows_alone_are_divided(classifier: ModelFolder, tmp_path: Path) -> None:
    data = open_data(rows_config(tsv(tmp_path / "a.tsv", *labelled_rows(40))), classifier)
    assert sizes(data) == [36, 2, 2]
    assert codes(data) == [NoteCode.ROWS_SET_ASIDE] * 2


def test_more_rows_are_set_aside_where_they_have_to_tell_a_small_loss(classifier: ModelFolder, tmp_path: Path) -> None:
    rows, test = tsv(tmp_path / "a.tsv", *labelled_rows(40)), tsv(tmp_path / "t.tsv", *labelled_rows(4))
    for named, expected in (((rows,), [28, 6, 6]), ((rows, None, test), [28, 12, 4])):
        assert sizes(open_data(rows_config(*named), classifier, drawn_rows=40, bounds_loss=True)) == expected


def test_evaluation_or_test_rows_alone_suffice(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", *labelled_rows(8))
    data = open_data(rows_config(eval_data=path), classifier)
    assert (sizes(data), data.train_hash) == ([0, 4, 4], None)
    data = open_data(rows_config(test_data=path), classifier)
    assert (sizes(data), data.eval_hash) == ([0, 0, 8], None)


def test_the_hash_depends_on_rows_and_not_on_the_file(classifier: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "a.tsv", "1\tgood", "0\tbad")
    (tmp_path / "b.jsonl").write_text('{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n')
    swapped = tsv(tmp_path / "c.tsv", "0\tgood", "1\tbad")
    paths = (rows, str(tmp_path / "b.jsonl"), swapped)
    hashes = [open_data(rows_config(path, rows, rows), classifier).train_hash for path in paths]
    assert hashes[0] == hashes[1] != hashes[2]
    assert str(hashes[0]).startswith("sha256:")


@pytest.mark.parametrize(
    ("columns", "digest"),
    [
        (
            {"input_ids": [[2, 7, 3], [2, 3]], "labels": [1, 0], "length": [3, 2]},
            "3bd7f9b3fa89b1d048e0787fec2cb33d95c2d86440926b2440e3a9fa569a2994",
        ),
        ({"digest": ["a", "b"], "labels": [1, 0]}, "04b79c3bddabc62466a5fd3d5ecf8e01224a2dcb04e334730456aaa1f6e5ec88"),
    ],
)
def test_stored_hashes_of_rows_stay_valid(columns: dict[str, Any], digest: str) -> None:
    assert rows_hash(Dataset.from_dict(columns)) == f"sha256:{digest}"


def test_training_texts_come_from_the_file(tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "1\tgood", "0\tbad")
    assert training_texts(rows_config(path)) == ["good", "bad"]


def test_rows_that_are_too_few_to_be_divided_are_named(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "train\t1\ta", "train\t0\tb", "dev\t1\ta", header=SPLITS)
    with fails_with(ErrorCode.TOO_FEW_ROWS, source=f"{path} [dev]", rows=1, minimum=2, field="test_data"):
        open_data(rows_config(path), classifier)
    path = tsv(tmp_path / "b.tsv", "1\ta", "0\tb")
    with fails_with(ErrorCode.TOO_FEW_ROWS, source=path, rows=2, minimum=3, field="eval_data") as caught:
        open_data(rows_config(path), classifier)
    assert str(caught.value).startswith(path)


def test_splits_for_other_purposes_are_refused(classifier: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "dev\t1\ta", "test\t0\tb", header=SPLITS)
    with fails_with(ErrorCode.UNKNOWN_NAME, split="train", splits=("dev", "test")):
        open_data(rows_config(path), classifier)


def test_rows_are_needed(classifier: ModelFolder) -> None:
    with fails_with(ErrorCode.MISSING_VALUE, field="data"):
        open_data(rows_config(), classifier)


def test_messages(classifier: ModelFolder, tmp_path: Path) -> None:
    train = tsv(tmp_path / "a.tsv", *labelled_rows(20), header="gold\ttext")
    with fails_with(ErrorCode.COLUMN_MISSING) as caught:
        open_data(rows_config(train), classifier)
    assert str(caught.value) == (
        f"{train}: no column of labels among gold, text; add 'label', or name the column (--label-column)"
    )
    data = open_data(rows_config(train, label_column="gold"), classifier, seed=3)
    assert [str(note) for note in data.notes] == [
        "no evaluation data was named: 2 of the training rows, drawn with seed 3, were set aside for it; a model"
        " that was trained on these rows scores higher on them than on new ones",
        "no test data was named: 1 of the evaluation rows, drawn with seed 3, were set aside for it",
    ]


def test_test_rows_that_are_training_rows_are_noted(classifier: ModelFolder, tmp_path: Path) -> None:
    train = tsv(tmp_path / "a.tsv", *labelled_rows(40))
    distinct = tsv(tmp_path / "b.tsv", *(f"{row} again" for row in labelled_rows(40)))
    assert NoteCode.ROWS_REPEATED in codes(open_data(rows_config(train, distinct, train), classifier))
    assert NoteCode.ROWS_REPEATED in codes(open_data(rows_config(distinct, train, train), classifier))
    assert NoteCode.ROWS_REPEATED not in codes(open_data(rows_config(train, test_data=distinct), classifier))
    assert NoteCode.ROWS_REPEATED not in codes(open_data(rows_config(train), classifier)), "rows set aside"


@pytest.mark.parametrize("together", [1, 7])
def test_rows_are_drawn_in_their_order(together: int) -> None:
    rows = Dataset.from_dict({"number": list(range(100))})
    first, again, reseeded = (draw_indices(100, 20, seed, together).tolist() for seed in (1, 1, 2))
    assert first == again == sorted(set(first))
    assert first != reseeded
    assert 20 - together < len(first) < 20 + together
    groups = {number // together for number in first}
    assert first == [number for number in range(100) if number // together in groups]
    assert draw_rows(rows, 20, 1)["number"][:] == draw_indices(100, 20, 1).tolist()
    assert draw_rows(rows, 100, 1) is rows


@pytest.mark.zoo
def test_a_run_that_draws_rows_encodes_some_of_many(classifier: ModelFolder, tmp_path: Path) -> None:
    train = text(tmp_path / "train.txt", *("good" for _ in range(2**17 + 1000)))
    evaluation = tsv(tmp_path / "b.tsv", *labelled_rows(6))
    data = open_data(rows_config(train, evaluation, evaluation), classifier, drawn_rows=10)
    assert len(data.train) == 2**17
    assert NoteCode.ROWS_DRAWN in codes(data)


@pytest.mark.parametrize(
    ("header", "rows", "expected"),
    [
        ("text", ["good film"] * 4, [3, 1, 0]),
        ("split\ttext", ["train\tgood", "train\tbad", "dev\tone", "test\ttwo"], [2, 1, 0]),
    ],
)
def test_rows_without_labels_are_not_scored(
    classifier: ModelFolder, tmp_path: Path, header: str, rows: list[str], expected: list[int]
) -> None:
    config = rows_config(tsv(tmp_path / "a.tsv", *rows, header=header))
    data = open_data(config, classifier, drawn_rows=8)
    assert (sizes(data), data.scores_eval) == (expected, False)
    assert NoteCode.ROWS_UNLABELLED in codes(data)
    with fails_with(ErrorCode.COLUMN_MISSING, field="label_column"):
        open_data(config, classifier)
    with fails_with(ErrorCode.COLUMN_MISSING, field="label_column", value="mood"):
        open_data(config.model_copy(update={"label_column": "mood"}), classifier, drawn_rows=8)


@pytest.mark.parametrize(("split", "scores_eval"), [("eval_data", True), ("test_data", False)])
def test_rows_that_are_named_to_be_scored_need_labels(
    classifier: ModelFolder, tmp_path: Path, split: str, scores_eval: bool
) -> None:
    train = tsv(tmp_path / "a.tsv", *["good film"] * 4, header="text")
    named = tsv(tmp_path / "b.tsv", *labelled_rows(8))
    data = open_data(rows_config(train, **{split: named}), classifier, drawn_rows=8)
    assert data.scores_eval is scores_eval
    assert len(data.test) > 0
    with fails_with(ErrorCode.COLUMN_MISSING, field="label_column"):
        open_data(rows_config(train, **{split: train}), classifier, drawn_rows=8)


def test_rows_without_tokens_and_images_count_with_all_columns() -> None:
    rows = [{"values": [[1.0]], "labels": [0]}, {"values": [[2.0]], "labels": [0]}, {"others": [[1.0]], "labels": [0]}]
    assert len({rows_hash(Dataset.from_dict(columns)) for columns in rows}) == 3


def test_columns_are_hashed_as_they_are_stored() -> None:
    """Images would be decoded to objects without a content of their own, and long arrays be abbreviated."""
    files = [png(number) for number in (0, 1)]
    images = [
        Dataset.from_dict({"image": [{"bytes": file, "path": None}]}, features=Features({"image": Image()}))
        for file in (files[0], files[0], files[1])
    ]
    assert rows_hash(images[0]) == rows_hash(images[1]) != rows_hash(images[2])
    numbers = np.zeros((1, 5000), np.float32)
    first = Dataset.from_dict({"values": numbers}).with_format("torch")
    numbers[0, 2500] = 1
    second = Dataset.from_dict({"values": numbers}).with_format("torch")
    assert rows_hash(first) != rows_hash(second)
    assert rows_hash(first) == rows_hash(first.with_format("numpy"))


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


def test_a_task_that_needs_labels_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuestionAnswering, "encode_unlabelled", Task.encode_unlabelled)  # as in a custom task
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
