"""Rows of large files and of folders: read in chunks, joined, and on disk beyond a limit."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode
from compressor.model_folder import ModelFolder
from compressor.tasks.base import make_task
from compressor.tasks.row_files import read_rows
from compressor.tasks.splits import named_splits
from tests.faults import fails_with

LONG = "good bad film " * 70
POOLS: list[pa.MemoryPool] = []
"""Pools that tables still give their memory back to."""


def write_file(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_file_is_read_in_blocks_as_it_is_at_once(tmp_path: Path) -> None:
    texts = [f"{number} " + "ü" * (number % 997) for number in range(5_000)]
    rows = [{"label": str(number % 2), "text": text} for number, text in enumerate(texts)]
    contents = {
        "a.tsv": "label\ttext\n" + "".join(f"{row['label']}\t{row['text']}\n" for row in rows),
        "a.csv": "label,text\n" + "".join(f'{row["label"]},"{row["text"]}"\n' for row in rows),
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "a.txt": "\n\n".join(texts) + "\n\n",
    }
    for name, content in contents.items():
        read, _ = read_rows([write_file(tmp_path / name, content)], in_memory=2**20)
        expected = [{"text": text} for text in content.rstrip("\n").split("\n")] if name == "a.txt" else rows
        assert read.to_list() == expected


def test_a_fault_behind_the_first_block_names_its_line(tmp_path: Path) -> None:
    start = f'{{"text": "{LONG}"}}\n'.encode() * 3000
    for end in (b'{"text"\n', b'{"text": "\xff"}\n', b'{"text": "\x00"}\n'):
        path = write_file(tmp_path / "a.jsonl", start + end)
        with fails_with(ErrorCode.FILE_UNREADABLE, path=path, line=3001):
            read_rows([path])


def test_types_of_later_rows_are_joined_to_those_of_earlier_ones(tmp_path: Path) -> None:
    parts = [{"text": LONG, "label": 1, "note": None}, {"text": LONG, "label": 0.5, "note": "c"}, {"text": "d"}]
    path = write_file(tmp_path / "a.jsonl", "".join((json.dumps(part) + "\n") * 2500 for part in parts))
    rows, _ = read_rows([path], in_memory=2**20)
    assert len(rows) == 7500
    assert rows[0] == {"text": LONG, "label": 1.0, "note": None}
    assert rows[7499] == {"text": "d", "label": None, "note": None}
    path = write_file(tmp_path / "b.jsonl", (json.dumps({"text": LONG}) + "\n") * 3000 + '{"text": 1}\n')
    with fails_with(ErrorCode.FILE_UNREADABLE, path=path):
        read_rows([path])


def test_the_files_of_a_folder_are_joined_by_name(tmp_path: Path) -> None:
    write_file(tmp_path / "2.jsonl.gz", gzip.compress(b'{"label": "1", "text": "two"}\n'))
    write_file(tmp_path / "1.csv", 'label,text\n0,"one"\n')
    pyarrow.parquet.write_table(pa.table({"text": ["three"], "label": ["0"]}), tmp_path / "3.parquet")
    write_file(tmp_path / "README.md", "Rows")
    write_file(tmp_path / ".4.tsv", "hidden")
    splits = named_splits(str(tmp_path))
    assert list(splits) == [""]
    assert [row["text"] for row in splits[""]] == ["one", "two", "three"]
    assert [row["label"] for row in splits[""]] == ["0", "1", "0"]


def test_the_files_of_a_folder_may_be_named_after_splits(tmp_path: Path) -> None:
    for name in ("train-0.tsv", "train-1.tsv", "dev.tsv"):
        write_file(tmp_path / name, f"text\n{name}\n")
    splits = named_splits(str(tmp_path))
    assert {split: list(rows["text"]) for split, rows in splits.items()} == {
        "train": ["train-0.tsv", "train-1.tsv"],
        "dev": ["dev.tsv"],
    }
    write_file(tmp_path / "more.tsv", "text\na\n")
    with fails_with(ErrorCode.INVALID_VALUE, path=tmp_path / "more.tsv"):
        named_splits(str(tmp_path))


def test_folders_of_other_or_no_rows_are_refused(tmp_path: Path) -> None:
    with fails_with(ErrorCode.FILE_MISSING, path=tmp_path):
        named_splits(str(tmp_path))
    write_file(tmp_path / "1.tsv", "text\na\n")
    write_file(tmp_path / "2.tsv", "text\tlabel\na\t1\n")
    with fails_with(ErrorCode.FILE_MISMATCH, path=tmp_path / "2.tsv", columns=("text", "label")):
        named_splits(str(tmp_path))


@pytest.mark.parametrize("name", ["a.parquet", "a.parquet.gz"])
def test_damaged_and_packed_parquet_is_refused(tmp_path: Path, name: str) -> None:
    path = write_file(tmp_path / name, b"PAR1 but no more")
    code = ErrorCode.FILE_UNREADABLE if name.endswith("parquet") else ErrorCode.INVALID_VALUE
    with fails_with(code, path=path):
        read_rows([path])


def test_a_disk_that_is_too_small_for_rows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with fails_with(ErrorCode.DISK_FULL):
        read_rows([write_file(tmp_path / "a.tsv", "text\n" + "many words\n" * 1000)], in_memory=1000)


@contextmanager
def peak_of_memory() -> Iterator[list[int]]:
    """A list that gets the bytes that Python and Arrow held at most inside the context."""
    pool, former, peak = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool(), list[int]()
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1] + (pool.max_memory() or 0))
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(former)


def test_reading_holds_a_fraction_of_a_large_file(tmp_path: Path) -> None:
    path, count = tmp_path / "rows.tsv.gz", 100_000
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write("text\n" + f"{LONG}\n" * count)
    with peak_of_memory() as peak:
        rows, _ = read_rows([path], in_memory=2**20)
    assert peak[0] < count * len(LONG) / 2
    assert rows[count - 1] == {"text": LONG}


def test_encoding_many_rows_holds_no_more_than_few(classifier: ModelFolder) -> None:
    task = make_task(classifier, RowsConfig(max_length=16))
    peaks = []
    for count in (100, 2500, 5000):
        rows = Dataset.from_dict({"text": ["good bad film"] * count})
        tracemalloc.start()
        task.encode_unlabelled(rows, "rows")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.5 * peaks[1]
