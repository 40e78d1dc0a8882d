"""Files in the format of CoNLL: words and tags of sentences."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from compressor.errors import ErrorCode, InputError
from compressor.tasks import row_files
from compressor.tasks.row_files import read_rows
from tests.faults import fails_with


def rows_of(path: Path, content: str) -> dict[str, list[list[str]]]:
    path.write_text(content)
    return dict(read_rows([path])[0].to_dict())


def test_the_first_column_is_the_word_and_the_last_the_tag(tmp_path: Path) -> None:
    content = "\n-DOCSTART- -X- -X- O\n\n\nEU NNP I-NP B-ORG\nrejects  VBZ\tI-VP O\r\n \t\n\nPeter NNP I-NP B-PER"
    assert rows_of(tmp_path / "a.conll", content) == {
        "words": [["EU", "rejects"], ["Peter"]],
        "tags": [["B-ORG", "O"], ["B-PER"]],
    }


def test_a_document_divides_sentences(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "a.conll", "a O\n-DOCSTART- O\nb O\n")["words"] == [["a"], ["b"]]


def test_a_single_column_has_no_tags(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "a.conll", "one\ntwo\n\nthree\n") == {"words": [["one", "two"], ["three"]]}


def test_other_spaces_belong_to_words(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "a.conll", "10\u00a0000 B-NUM\n")["words"] == [["10\u00a0000"]]


def test_files_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "".join(f"word{number} O\n{'' if number % 3 else chr(10)}" for number in range(50))
    whole = rows_of(tmp_path / "a.conll", content)
    monkeypatch.setattr(row_files, "_CHUNK_CHARACTERS", 11)
    assert rows_of(tmp_path / "a.conll", content) == whole
    packed = tmp_path / "a.conll.gz"
    packed.write_bytes(gzip.compress(content.encode()))
    assert dict(read_rows([packed])[0].to_dict()) == whole


@pytest.mark.parametrize("line", ["word", "O", "word NN O"])
def test_lines_with_other_columns_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text(f"a O\n\nb O\n{line}\n")
    with fails_with(ErrorCode.FILE_UNREADABLE, path=path, line=4):
        read_rows([path])


@pytest.mark.parametrize("content", ["", "\n\n", "-DOCSTART- O\n\n"])
def test_a_file_without_words_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text(content)
    with fails_with(ErrorCode.TOO_FEW_ROWS, InputError, rows=0):
        read_rows([path])
