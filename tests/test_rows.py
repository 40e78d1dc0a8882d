"""Rows: what a file says is what is read, and no content whatsoever ends in anything but rows or one line."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import BertConfig

from compressor.errors import InputError
from compressor.tasks.columns import label_column, text_columns
from compressor.tasks.labels import class_ids, classes_of, numbers_of
from compressor.tasks.row_files import read_file
from compressor.tasks.splits import named_splits, pick

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return read_file(path).to_list()


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.tsv", 'label\ttext\n1\tsay "no\n0\t"\n', [{"label": "1", "text": 'say "no'}, {"label": "0", "text": '"'}]),
        ("a.tsv", "label\ttext\r\n1\t\r\n", [{"label": "1", "text": ""}]),
        ("a.tsv", "\ufefftext\nna\nNULL", [{"text": "na"}, {"text": "NULL"}]),
        ("a.csv", 'label,text\n1,"a, ""b""\nc"\n', [{"label": "1", "text": 'a, "b"\nc'}]),
        (
            "a.jsonl",
            '{"label": 1, "text": "ü"}\n\n{"label": 0, "text": ""}\n',
            [{"label": 1, "text": "ü"}, {"label": 0, "text": ""}],
        ),
        ("a.txt", "one\n\n two\u2028three\n", [{"text": "one"}, {"text": ""}, {"text": " two\u2028three"}]),
    ],
)
def test_files_are_read_as_written(
    tmp_path: Path, packing: str, name: str, content: str, expected: list[dict[str, Any]]
) -> None:
    path = write(tmp_path / (name + packing), PACK[packing](content.encode()))
    assert rows_of(path) == expected
    assert not list(tmp_path.glob("*.arrow"))


FAULTS: dict[str, tuple[str, bytes, str]] = {
    "unknown ending": ("a.parquet", b"x", "rows come as .tsv, .csv, .jsonl, .txt"),
    "unknown ending, packed": ("a.xz", lzma.compress(b"x"), "rows come as .tsv, .csv, .jsonl, .txt"),
    "nothing": ("a.tsv", b"", "holds no row"),
    "blank": ("a.jsonl", b" \n\n", "holds no row"),
    "a header alone": ("a.csv", b"label,text\n", "holds no row"),
    "too many cells": ("a.tsv", b"label\ttext\n1\ta\n1\ta\tb\n", "Row #3: Expected 2 columns, got 3"),
    "too few cells": ("a.tsv", b"label\ttext\n1\n", "Row #2: Expected 2 columns, got 1"),
    "one name twice": ("a.csv", b"text,text\na,b\n", "two columns are named 'text'"),
    "not UTF-8": ("a.tsv", "label\ttext\n1\tgrün\n".encode("latin-1"), "line 2 is not UTF-8"),
    "UTF-16": ("a.csv", "label,text\n1,a\n".encode("utf-16"), "line 1 is not UTF-8"),
    "zero bytes": ("a.tsv", b"text\na\x00b\n", "line 2 holds a zero byte"),
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text"\n', "cannot be read as jsonl (line 2:"),
    "JSON of two kinds": ("a.jsonl", b'{"text": "a"}\n{"text": 1}\n', "values of 'text' do not go together"),
    "JSON without names": ("a.jsonl", b"[1]\n", "line 1 is no object"),
    "JSON with a name twice": ("a.jsonl", b'\n{"text": "a", "text": "b"}\n', "line 2: 'text' stands there twice"),
    "JSON too deep": ("a.jsonl", b"[" * 100000, "cannot be read as jsonl (line 1:"),
    "not packed": ("a.tsv.xz", b"text\na\n", "is damaged and cannot be unpacked"),
    "not packed either": ("a.tsv.gz", b"text\na\n", "is damaged and cannot be unpacked"),
    "cut short": ("a.tsv.xz", lzma.compress(b"text\na\n" * 99)[:-9], "is damaged and cannot be unpacked"),
    "cut short too": ("a.tsv.gz", gzip.compress(b"text\na\n" * 99)[:-9], "is damaged and cannot be unpacked"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_files_are_one_line(tmp_path: Path, fault: str) -> None:
    name, content, says = FAULTS[fault]
    path = write(tmp_path / name, content)
    with pytest.raises(InputError) as caught:
        read_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert says in message
    assert ";" in message
    assert "\n" not in message


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.tsv: cannot be read \(No such file or directory\); check the path"):
        named_splits(str(tmp_path / "none.tsv"))
    (tmp_path / "rows.tsv").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        named_splits(str(tmp_path / "rows.tsv"))


def test_a_data_set_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError) as caught:
        named_splits("nobody/nothing")
    assert str(caught.value).startswith(
        "nobody/nothing: no such file, and as a Hugging Face data set it cannot be loaded"
    )
    assert "\n" not in str(caught.value)


def test_a_data_set_by_name_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(path: str, configuration: str | None) -> DatasetDict:
        asked.append((path, configuration))
        return DatasetDict(
            {"train": Dataset.from_dict({"text": ["a"]}), "validation": Dataset.from_dict({"text": ["b"]})}
        )

    monkeypatch.setattr("compressor.tasks.splits.load_dataset", fetch)
    assert list(named_splits("glue:sst2")) == list(named_splits("owner/rows")) == ["train", "validation"]
    assert asked == [("glue", "sst2"), ("owner/rows", None)]


# Splits


def test_a_split_column_divides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "split\ttext\ntrain\ta\ndev\tb\ntrain\tc\n")
    found = named_splits(str(path))
    assert {name: list(rows["text"]) for name, rows in found.items()} == {"train": ["a", "c"], "dev": ["b"]}


def test_a_column_of_that_name_that_names_no_split_is_a_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "split\ttext\nbanana\ta\npea\tb\n")
    assert list(named_splits(str(path))) == [""]


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


# Columns


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("split", "label", "sentence"), ("sentence",)),
        (("domain", "text"), ("text",)),
        (("hypothesis", "premise"), ("premise", "hypothesis")),
        (("sentence2", "sentence1"), ("sentence1", "sentence2")),
        (("question", "sentence"), ("question", "sentence")),
    ],
)
def test_text_columns_are_found_by_name(names: tuple[str, ...], expected: tuple[str, ...]) -> None:
    rows = Dataset.from_dict({name: ["a"] for name in names})
    assert text_columns(rows, (), "f") == expected


def test_named_columns_win() -> None:
    rows = Dataset.from_dict({"text": ["a"], "left": ["b"], "right": ["c"], "label": [1], "gold": [0]})
    assert text_columns(rows, ("right", "left"), "f") == ("right", "left")
    assert label_column(rows, None, "f") == "label"
    assert label_column(rows, "gold", "f") == "gold"


@pytest.mark.parametrize(
    ("columns", "wanted", "says"),
    [
        ({"a": ["x"]}, (), "f: no column of text among a; name it (--text-columns)"),
        ({"text": ["x"]}, ("body",), "f: no column 'body' among text; name one of these (--text-columns)"),
        ({"text": [1]}, (), "f: column 'text' does not hold text; name one that does (--text-columns)"),
        ({"text": ["x", None]}, (), "f: row 2 has no 'text'; fill it or leave the row out"),
        ({"a": ["x"], "b": ["x"], "c": ["x"]}, ("a", "b", "c"), "f: 3 text columns were named"),
    ],
)
def test_faults_of_text_columns(columns: dict[str, list[Any]], wanted: tuple[str, ...], says: str) -> None:
    with pytest.raises(InputError) as caught:
        text_columns(Dataset.from_dict(columns), wanted, "f")
    assert str(caught.value).startswith(says)


def test_no_label_column() -> None:
    rows = Dataset.from_dict({"text": ["a"], "sentiment": ["b"]})
    with pytest.raises(InputError, match="no label column among text, sentiment; add `label` or name it"):
        label_column(rows, None, "f")
    with pytest.raises(InputError, match="no column 'gold' among text, sentiment"):
        label_column(rows, "gold", "f")


# Labels


def ids_of(labels: list[Any], **config: Any) -> dict[str, int]:
    return class_ids(Dataset.from_dict({"label": labels}), "label", BertConfig(**config), "f")


NAMED: dict[int, str] = {0: "entailment", 1: "neutral", 2: "contradiction"}


def test_numbers_stand_for_themselves() -> None:
    for labels in ([1, 0], ["1", "0"], [1.0, 0.0], ["1.0", " 0 "], [True, False]):
        rows = Dataset.from_dict({"label": labels})
        assert classes_of(rows, "label", ids_of(labels, num_labels=2), "f") == [1, 0]


def test_names_that_the_model_knows_are_its_own() -> None:
    ids = ids_of(["Neutral", "contradiction"], id2label=NAMED)
    assert (ids["Neutral"], ids["contradiction"], ids["entailment"]) == (1, 2, 0)


def test_other_names_are_numbered_in_order_for_every_split() -> None:
    ids = ids_of(["pos", "neg", "pos"], num_labels=2)
    assert ids == {"neg": 0, "pos": 1}
    assert classes_of(Dataset.from_dict({"label": ["pos"]}), "label", ids, "dev") == [1]


def test_a_split_may_lack_a_class_that_the_model_has() -> None:
    ids = ids_of([0, 1], num_labels=3)
    assert classes_of(Dataset.from_dict({"label": [2]}), "label", ids, "dev") == [2]


@pytest.mark.parametrize(
    ("labels", "config", "says"),
    [
        ([1, 1], {"num_labels": 2}, "every row has the label '1'; give rows of two classes or more"),
        ([1, 2], {"num_labels": 2}, "label 2 is outside the model's range 0 to 1"),
        ([-1, 0], {"num_labels": 2}, "label -1 is outside the model's range 0 to 1"),
        (["a", "b", "c"], {"num_labels": 2}, "3 different labels (a, b, c), the model has 2 classes"),
        (["a", None], {"num_labels": 2}, "row 2 has no usable 'label' (None)"),
        (["a", " "], {"num_labels": 2}, "row 2 has no usable 'label' (' ')"),
        ([[1], [0]], {"num_labels": 2}, "row 1 has no usable 'label' ([1])"),
    ],
)
def test_faults_of_labels(labels: list[Any], config: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        ids_of(labels, **config)
    assert says in str(caught.value)


def test_a_label_that_training_did_not_have() -> None:
    ids = ids_of(["pos", "neg"], num_labels=2)
    with pytest.raises(InputError, match="dev: label 'meh' is none of neg, pos; mend the label"):
        classes_of(Dataset.from_dict({"label": ["meh"]}), "label", ids, "dev")


def test_numbers_of_a_data_set_go_by_their_names_where_the_model_knows_them() -> None:
    features = Features({"label": ClassLabel(names=["contradiction", "entailment"])})
    rows = Dataset.from_dict({"label": [0, 1]}, features=features)
    assert classes_of(rows, "label", class_ids(rows, "label", BertConfig(id2label=NAMED), "f"), "f") == [2, 0]
    assert classes_of(rows, "label", class_ids(rows, "label", BertConfig(), "f"), "f") == [0, 1]


def test_withheld_labels_are_told_as_such() -> None:
    features = Features({"label": ClassLabel(names=["no", "yes"])})
    rows = Dataset.from_dict({"label": [-1, -1]}, features=features)
    with pytest.raises(InputError, match=r"its labels are withheld \(-1\)"):
        classes_of(rows, "label", {"0": 0, "1": 1}, "f")


def test_numbers() -> None:
    rows = Dataset.from_dict({"score": ["3.80", "5", "-1e-3"]})
    assert numbers_of(rows, "score", "f") == [3.8, 5.0, -0.001]
    for bad in ("high", "nan", "inf"):
        with pytest.raises(InputError, match=f"row 1 has the label '{bad}', regression needs a number"):
            numbers_of(Dataset.from_dict({"score": [bad]}), "score", "f")


# Whatever the content

TWO = BertConfig()
CELL = st.text(st.characters(exclude_characters="\t\n\r\x00", exclude_categories=["Cs"]), max_size=8)
KINDS = st.sampled_from([".tsv", ".csv", ".jsonl", ".txt"])


def survives(path: Path) -> None:
    """Reading, dividing and finding columns and labels gives rows or one line, never anything else."""
    try:
        for rows in named_splits(str(path)).values():
            assert len(rows)
            text_columns(rows, (), "f")
            ids = class_ids(rows, label_column(rows, None, "f"), TWO, "f")
            assert set(classes_of(rows, label_column(rows, None, "f"), ids, "f")) <= {0, 1}
    except InputError as error:
        message = str(error)
    else:
        return
    assert "\n" not in message


@FUZZ
@given(kind=KINDS, packing=st.sampled_from(list(PACK)), packed=st.booleans(), content=st.binary(max_size=200))
@example(kind=".jsonl", packing="", packed=True, content=b'{"label": 1e400}')
def test_any_bytes(tmp_path: Path, kind: str, packing: str, packed: bool, content: bytes) -> None:
    survives(write(tmp_path / f"a{kind}{packing}", PACK[packing](content) if packed else content))


ROW_WORDS = st.sampled_from(
    ["label", "text", "split", "train", "dev", "0", "1", "2", '"', ",", "\t", "\n", "\r", "é", " "]
)


@FUZZ
@given(kind=KINDS, words=st.lists(ROW_WORDS, max_size=40))
def test_anything_that_looks_like_rows(tmp_path: Path, kind: str, words: list[str]) -> None:
    survives(write(tmp_path / f"a{kind}", "".join(words)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["label", "text", ""]), inner, max_size=3)
    ),
    max_leaves=6,
)


@FUZZ
@given(lines=st.lists(JSON | st.fixed_dictionaries({"text": st.text(max_size=5), "label": JSON}), max_size=5))
def test_any_json(tmp_path: Path, lines: list[Any]) -> None:
    survives(write(tmp_path / "a.jsonl", "\n".join(json.dumps(line) for line in lines)))


@FUZZ
@given(rows=st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6))
def test_tabs_divide_and_nothing_else_does(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    content = "a\tb\n" + "".join(f"{left}\t{right}\n" for left, right in rows)
    assert rows_of(write(tmp_path / "a.tsv", content)) == [{"a": left, "b": right} for left, right in rows]


@FUZZ
@given(lines=st.lists(CELL, min_size=1, max_size=6).filter(any))
def test_lines_are_rows_of_plain_text(tmp_path: Path, lines: list[str]) -> None:
    content = "\n".join(lines)
    if content.strip():
        found = [row["text"] for row in rows_of(write(tmp_path / "a.txt", content))]
        assert "\n".join(found) == content.rstrip("\n")


def test_text_of_any_width_is_text() -> None:
    features = Features({"text": Value("large_string")})
    assert text_columns(Dataset.from_dict({"text": ["a"]}, features=features), (), "f") == ("text",)
