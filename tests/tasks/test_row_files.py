"""Files of rows are read as they are written; a fault names its line."""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import BertConfig

from compressor.errors import ErrorCode, InputError
from compressor.tasks.columns import LabelColumn, TextColumns
from compressor.tasks.labels import class_ids, classes_of
from compressor.tasks.row_files import read_rows
from compressor.tasks.splits import named_splits
from tests.faults import fails_with

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}
FORMATS = (".tsv", ".csv", ".jsonl", ".txt", ".conll")
FUZZ = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return read_rows([path])[0].to_list()


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.tsv", 'label\ttext\n1\tsay "no\n0\t"\n', [{"label": "1", "text": 'say "no'}, {"label": "0", "text": '"'}]),
        ("a.tsv", "label\ttext\r\n1\t\r\n", [{"label": "1", "text": ""}]),
        ("a.tsv", "\ufefftext\nna\nNULL", [{"text": "na"}, {"text": "NULL"}]),
        ("a.csv", 'label,text\n1,"a, ""b""\nc"\n', [{"label": "1", "text": 'a, "b"\nc'}]),
        ("a.csv", "label, text \n1, a\n", [{"label": "1", "text": " a"}]),
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


LINE_FAULTS: dict[str, tuple[str, bytes, int]] = {
    "not UTF-8": ("a.tsv", "label\ttext\n1\tgrün\n".encode("latin-1"), 2),
    "UTF-16 without its end": ("a.csv", "label,text\n1,a\n".encode("utf-16")[:-1], 2),
    "text behind quotes": ("a.csv", b'label,text\n1,a\n0,"b" c\n', 3),
    "zero bytes": ("a.tsv", b"text\na\x00b\n", 2),
    "not JSON": ("a.jsonl", b'{"text": "a"}\n{"text"\n', 2),
    "JSON without keys": ("a.jsonl", b"[1]\n", 1),
    "JSON with a repeated key": ("a.jsonl", b'\n{"text": "a", "text": "b"}\n', 2),
    "JSON with half a character": ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n', 2),
    "JSON with a number beyond any type": ("a.jsonl", b'{"id": 1}\n{"id": 36893488147419103232}\n', 2),
    "an open quote": ("a.csv", b'label,text\n1,a\n0,"b\n1,c\n', 3),
    "JSON too deep": ("a.jsonl", b"[" * 100000, 1),
}


@pytest.mark.parametrize("fault", LINE_FAULTS)
def test_a_fault_in_a_line_names_the_line(tmp_path: Path, fault: str) -> None:
    name, content, line = LINE_FAULTS[fault]
    path = write(tmp_path / name, content)
    with fails_with(ErrorCode.FILE_UNREADABLE, path=path, line=line) as caught:
        read_rows([path])
    assert f"line {line}" in str(caught.value)


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        ((["A"], [1, 0]), 2),
        ((["A"], ["B"], None, [1], [2]), 4),
        ((["A"], [1, "B"]), 2),
        (([1, "B"], ["A"]), 1),
        (([], [None], [1.5], [2], [[1]]), 5),
        (([{"start": 1}], [{"start": 2.5}], [{"start": "3"}]), 3),
        (([{"start": 1}], ["rome"]), 2),
        (([1], 1), 2),
    ],
)
def test_a_list_of_another_type_names_its_line_and_column(tmp_path: Path, cells: tuple[Any, ...], line: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "tags": cell}) + "\n" for cell in cells))
    with fails_with(ErrorCode.FILE_UNREADABLE, path=path, line=line, column="tags"):
        read_rows([path])


FILE_FAULTS: dict[str, tuple[str, bytes, ErrorCode, dict[str, Any]]] = {
    "unknown suffix": ("a.arrow", b"x", ErrorCode.INVALID_VALUE, {}),
    "unknown suffix, compressed": ("a.xz", lzma.compress(b"x"), ErrorCode.INVALID_VALUE, {}),
    "empty": ("a.tsv", b"", ErrorCode.TOO_FEW_ROWS, {"rows": 0}),
    "blank": ("a.jsonl", b" \n\n", ErrorCode.TOO_FEW_ROWS, {"rows": 0}),
    "a header alone": ("a.csv", b"label,text\n", ErrorCode.TOO_FEW_ROWS, {"rows": 0}),
    "a repeated name": ("a.csv", b"text,text\na,b\n", ErrorCode.FILE_UNREADABLE, {"column": "text"}),
    "JSON of two types": ("a.jsonl", b'{"text": "a"}\n{"text": 1}\n', ErrorCode.FILE_UNREADABLE, {"line": 2}),
    "JSON of two types behind numbers": (
        "a.jsonl",
        b'{"x": 1}\n{"x": 2.5}\n{"x": "a"}\n',
        ErrorCode.FILE_UNREADABLE,
        {"line": 3},
    ),
    "not xz": ("a.tsv.xz", b"text\na\n", ErrorCode.FILE_UNREADABLE, {}),
    "not gzip": ("a.tsv.gz", b"text\na\n", ErrorCode.FILE_UNREADABLE, {}),
    "truncated xz": ("a.tsv.xz", lzma.compress(b"text\na\n" * 99)[:-9], ErrorCode.FILE_UNREADABLE, {}),
    "truncated gzip": ("a.tsv.gz", gzip.compress(b"text\na\n" * 99)[:-9], ErrorCode.FILE_UNREADABLE, {}),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_fault_of_a_file_names_the_file(tmp_path: Path, fault: str) -> None:
    name, content, code, details = FILE_FAULTS[fault]
    path = write(tmp_path / name, content)
    with fails_with(code, path=path, **details) as caught:
        read_rows([path])
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("fault", ["empty", "truncated", "footer", "page"])
def test_a_damaged_parquet_file_is_named_with_the_reason(tmp_path: Path, fault: str) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": [f"a film {number}" for number in range(200)]}), buffer)
    content = buffer.getvalue()
    garbage, footer = b"\xff" * 12, len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    damaged = {
        "empty": b"",
        "truncated": content[:-9],
        "footer": content[:footer] + garbage + content[footer + 12 :],
        "page": content[:4] + garbage + content[16:],
    }
    path = write(tmp_path / "a.parquet", damaged[fault])
    with fails_with(ErrorCode.FILE_UNREADABLE, path=path) as caught:
        read_rows([path])
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.details["reason"]


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"label\ttext\n1\ta\n1\ta\tb\n", 3), (b"label\ttext\n1\n", 2), (b'a,b\n"1\n2",3\n4\n', 4)],
)
def test_ragged_rows_are_refused(tmp_path: Path, content: bytes, line: int) -> None:
    path = write(tmp_path / ("a.csv" if b"," in content else "a.tsv"), content)
    with fails_with(ErrorCode.FILE_UNREADABLE, path=path, line=line):
        read_rows([path])


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with fails_with(ErrorCode.FILE_MISSING, path=tmp_path / "none.tsv"):
        read_rows([tmp_path / "none.tsv"])
    (tmp_path / "rows.tsv").mkdir()
    with fails_with(ErrorCode.FILE_UNREADABLE, path=tmp_path / "rows.tsv"):
        read_rows([tmp_path / "rows.tsv"])


# Any content

CELL = st.text(st.characters(exclude_characters="\t\n\r\x00", exclude_categories=["Cs"]), max_size=8)
SUFFIXES = st.sampled_from(FORMATS)


def read_any(path: Path) -> None:
    """Reading, dividing and finding columns and labels gives rows or an InputError of one line, and nothing else."""
    try:
        for rows in named_splits(str(path)).values():
            assert len(rows)
            TextColumns().find(rows, (), "f")
            column = LabelColumn().find(rows, None, "f")
            config = BertConfig()
            ids = class_ids(rows, column, config, "f")
            assert set(classes_of(rows, column, ids, config, "f")) <= {0, 1}
    except InputError as error:
        message, code = str(error), error.code
    else:
        return
    assert "\n" not in message
    assert code is not ErrorCode.UNSPECIFIED


@FUZZ
@given(suffix=SUFFIXES, packing=st.sampled_from(list(PACK)), packed=st.booleans(), content=st.binary(max_size=200))
@example(suffix=".jsonl", packing="", packed=True, content=b'{"label": 1e400}')
def test_any_bytes_give_rows_or_one_error(
    tmp_path: Path, suffix: str, packing: str, packed: bool, content: bytes
) -> None:
    read_any(write(tmp_path / f"a{suffix}{packing}", PACK[packing](content) if packed else content))


PIECES = st.sampled_from([*"label text split train dev 0 1 2".split(), '"', ",", "\t", "\n", "\r", "é", " "])


@FUZZ
@given(suffix=SUFFIXES, pieces=st.lists(PIECES, max_size=40))
def test_any_text_like_rows_gives_rows_or_one_error(tmp_path: Path, suffix: str, pieces: list[str]) -> None:
    read_any(write(tmp_path / f"a{suffix}", "".join(pieces)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["label", "text", ""]), inner, max_size=3)
    ),
    max_leaves=6,
)


@FUZZ
@given(lines=st.lists(JSON | st.fixed_dictionaries({"text": st.text(max_size=5), "label": JSON}), max_size=5))
def test_any_json_gives_rows_or_one_error(tmp_path: Path, lines: list[Any]) -> None:
    read_any(write(tmp_path / "a.jsonl", "\n".join(json.dumps(line) for line in lines)))


@FUZZ
@given(rows=st.lists(st.tuples(CELL, CELL).filter(lambda row: '"' not in "".join(row)), min_size=1, max_size=6))
def test_only_tabs_separate_cells(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    content = "a\tb\n" + "".join(f"{left}\t{right}\n" for left, right in rows)
    assert rows_of(write(tmp_path / "a.tsv", content)) == [{"a": left, "b": right} for left, right in rows]


@FUZZ
@given(lines=st.lists(CELL, min_size=1, max_size=6).filter(any))
def test_lines_are_rows_of_plain_text(tmp_path: Path, lines: list[str]) -> None:
    content = "\n".join(lines)
    if content.strip():
        texts = [row["text"] for row in rows_of(write(tmp_path / "a.txt", content))]
        assert "\n".join(texts) == content.rstrip("\n")
