"""Splits of files and data sets, by their names."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from compressor.errors import ErrorCode
from compressor.tasks.splits import named_splits, pick
from tests.faults import fails_with
from tests.tasks.rows import tsv


def test_a_split_column_divides_the_file(tmp_path: Path) -> None:
    splits = named_splits(tsv(tmp_path / "a.tsv", "train\ta", "dev\tb", "train\tc", header="split\ttext"))
    assert {name: list(rows["text"]) for name, rows in splits.items()} == {"train": ["a", "c"], "dev": ["b"]}


@pytest.mark.parametrize("row", ["\tb", "dev\tb"])
def test_a_row_without_a_split_is_refused(row: str, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "train\ta", row, "\tc", header="split\ttext")
    with fails_with(ErrorCode.INVALID_ROWS, column="split", row=2 if row.startswith("\t") else 3):
        named_splits(path)


def test_a_split_column_without_names_of_splits_is_a_column(tmp_path: Path) -> None:
    splits = named_splits(tsv(tmp_path / "a.tsv", "banana\ta", "pea\tb", header="split\ttext"))
    assert list(splits) == [""]


@pytest.mark.parametrize(
    ("names", "train", "evaluation", "test"),
    [
        (("train", "dev", "test"), "train", "dev", "test"),
        (("TRAIN", "Validation"), "TRAIN", "Validation", None),
        (("train", "dev_mismatched", "dev_matched"), "train", "dev_matched", None),
        (("train", "val", "test_2016_flickr"), "train", "val", "test_2016_flickr"),
        (("train", "test", "unsupervised"), "train", None, "test"),
        (("latest", "developers"), None, None, None),
    ],
)
def test_names_of_splits(names: tuple[str, ...], train: str | None, evaluation: str | None, test: str | None) -> None:
    assert (pick(names, "train"), pick(names, "eval"), pick(names, "test")) == (train, evaluation, test)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with fails_with(ErrorCode.FILE_MISSING, path=tmp_path / "none.tsv"):
        named_splits(str(tmp_path / "none.tsv"))


def test_a_missing_data_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with fails_with(ErrorCode.FILE_MISSING, source="nobody/nothing"):
        named_splits("nobody/nothing")


def test_a_data_set_by_name_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def load_dataset(path: str, configuration: str | None) -> DatasetDict:
        requested.append((path, configuration))
        return DatasetDict(
            {"train": Dataset.from_dict({"text": ["a"]}), "validation": Dataset.from_dict({"text": ["b"]})}
        )

    monkeypatch.setattr("compressor.tasks.splits.load_dataset", load_dataset)
    assert list(named_splits("glue:sst2")) == list(named_splits("owner/rows")) == ["train", "validation"]
    assert requested == [("glue", "sst2"), ("owner/rows", None)]


def test_saved_data_sets_are_read(tmp_path: Path) -> None:
    rows = {name: Dataset.from_dict({"text": [name, "b"]}) for name in ("train", "test")}
    DatasetDict(rows).save_to_disk(str(tmp_path / "splits"))
    rows["test"].save_to_disk(str(tmp_path / "rows"))
    assert {name: list(part["text"]) for name, part in named_splits(str(tmp_path / "splits")).items()} == {
        "train": ["train", "b"],
        "test": ["test", "b"],
    }
    assert list(named_splits(str(tmp_path / "rows"))[""]["text"]) == ["test", "b"]
    (tmp_path / "rows" / "state.json").write_text("{")
    with fails_with(ErrorCode.FILE_UNREADABLE, path=tmp_path / "rows"):
        named_splits(str(tmp_path / "rows"))
