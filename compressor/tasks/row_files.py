"""Read rows from a file, or from the files of a folder, into a data set that may exceed the memory.

Files are parsed line by line into chunks, and their content is checked to be text. Python reads tables, since the CSV
builder of `datasets` uses pandas, which silently fills short rows and takes the first column of long rows as an index;
and JSON, since Arrow's reader, which the JSON builder of `datasets` calls, ends the process on some malformed lines.
"""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import io
import itertools
import json
import lzma
import os
import re
import shlex
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset

from compressor.config.values import PACKED, PARQUET, PLAIN_TEXT, ROW_FORMATS, TABLES, names_row_file
from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line
from compressor.tasks.row_store import IN_MEMORY_BYTES, RowOrigin, RowStore
from compressor.tasks.table_dialect import Dialect, find_dialect, header_evidence, proposed_names

Item = TypeVar("Item")
_CHUNK_CHARACTERS = 2**21  # characters of the rows that are parsed at once; a cell may not be longer
_SAMPLE_CHARACTERS = 2**16  # characters of the first rows of a table, by which its separator is known
_SEPARATOR_LINE = re.compile(r'"?sep=([ -~\t])"?\r?\n?')
"""First line in which spreadsheets name the separator of a table."""
_CELLS_REMEDY = "put quotes around a cell with a separator or a line end, or correct the names in the first line"
_DOCUMENT = "-DOCSTART-"  # first column of the lines that separate documents in CoNLL
_NO_COLUMN = (pa.ArrowException, ValueError, TypeError, OverflowError)
"""Errors of Arrow for values that cannot be a column."""
_READ_BYTES = 64  # first bytes of a file, which say what it is
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
"""Byte order mark -> encoding."""
_SIGNATURES = {
    b"\x1f\x8b": "is compressed by gzip; add .gz to its name",
    b"\xfd7zXZ\x00": "is compressed by xz; add .xz to its name",
    b"PK\x03\x04": "is a ZIP archive or a spreadsheet; unpack it, or save its sheet as .csv",
    b"\xd0\xcf\x11\xe0": "is a spreadsheet; save its sheet as .csv",
    b"PAR1": "is Parquet; rename it to .parquet",
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself; download the file (git lfs pull)",
}
"""First bytes of files other than text -> what the file is, and what to do."""
_UNPACKERS = dict(zip(PACKED, ("xz -dc", "gzip -dc"), strict=True))
_SINGLE = re.compile(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])")
_RUNS, _HIGH = re.compile(rb"[\x80-\xff]+"), re.compile(rb"[\x80-\xff]")
_LATIN = re.compile(rb"[\x80\x85\x91-\x97\x99\xa0-\xff]")
_LEAST_KNOWN = 0.9
"""Minimum share of letters, quotes and dashes in the bytes beyond ASCII of a text of Latin-1 or Windows-1252."""
_CONTROL = re.compile(rb"[\x80-\x9f]")
_OPENERS: Mapping[str, Callable[[Path], Any]] = dict(zip(PACKED, (lzma.open, gzip.open), strict=True))


def _parse(path: Path, file_format: str, file: BinaryIO) -> Iterator[pa.Table]:
    """The rows of a decompressed file as tables; raise ValueError or InputError if its content is malformed."""
    if file_format == PARQUET:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            yield pa.Table.from_batches([batch])
        return
    lines = _without_blank_file(TextFile(path, file, file_format).lines())
    if file_format == PLAIN_TEXT:
        yield from _plain_chunks(lines)
    elif file_format == ".jsonl":
        yield from _json_chunks(lines)
    elif file_format == ".conll":
        yield from _sentence_chunks(lines)
    else:
        yield from _table_chunks(lines, file_format)


def _without_blank_file(lines: Iterator[str]) -> Iterator[str]:
    """The lines of a file, none if all of them are white space."""
    blank: list[str] = []
    for line in lines:
        if line.strip():
            return itertools.chain(blank, [line], lines)
        blank.append(line)
    return iter(())


def _chunked(items: Iterator[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Lines or rows in chunks of about as many characters as are parsed at once."""
    chunk, size = list[Item](), 0
    for item in items:
        chunk.append(item)
        size += size_of(item)
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _line_chunks(lines: Iterator[str]) -> Iterator[list[tuple[int, str]]]:
    """Chunks of lines, each with its number."""
    return _chunked(enumerate(lines, 1), lambda numbered: len(numbered[1]))


def _dialect_of(lines: Iterator[str], suffix: str) -> tuple[Dialect, Iterator[str]]:
    """The dialect of a table by its first rows, and its lines without a first one that names the separator."""
    head, size = [], 0
    for line in lines:
        head.append(line)
        size += len(line)
        if size >= _SAMPLE_CHARACTERS:
            break
    if head and (named := _SEPARATOR_LINE.fullmatch(head[0])) is not None:
        return Dialect(named[1], True), itertools.chain(head[1:], lines)
    dialect = find_dialect("".join(head), suffix, is_whole=size < _SAMPLE_CHARACTERS)
    return dialect, itertools.chain(head, lines)


def _table_chunks(lines: Iterator[str], suffix: str) -> Iterator[pa.Table]:
    """The rows of a table, whose cells are texts."""
    dialect, lines = _dialect_of(lines, suffix)
    rows = _table_rows(lines, dialect)
    names = [name.strip() or f"column {number}" for number, name in enumerate(next(rows, ()), 1)]
    for chunk in _chunked(rows, lambda row: sum(map(len, row))):
        columns = [pa.array(column, pa.string()) for column in zip(*chunk, strict=True)]
        yield pa.Table.from_arrays(columns, names)


def _table_rows(lines: Iterator[str], dialect: Dialect) -> Iterator[list[str]]:
    """The rows of a table without blank lines, that of the names first; raise _LineError for a malformed row."""
    first = next(lines, "")
    _require_table(first)
    csv.field_size_limit(_CHUNK_CHARACTERS)  # so that a quote that is not closed does not read a whole file
    quoting: Any = csv.QUOTE_MINIMAL if dialect.is_quoted else csv.QUOTE_NONE
    reader = csv.reader(itertools.chain([first], lines), delimiter=dialect.separator, quoting=quoting, strict=True)
    columns = 0
    while True:
        begin = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "expected after" in str(error):
                problem = (
                    "text follows the quote that ends a cell; double the quotes inside of a cell and put quotes around"
                    " it, or remove them"
                )
                raise _LineError(reader.line_num, problem) from error
            raise _LineError(begin, f"a quote of the row is not closed, or a cell is too long ({error})") from error
        columns = columns or len(row)
        if row and len(row) != columns:
            problem = f"the row has {len(row)} cells, and the first line names {columns} columns"
            raise _LineError(begin, f"{problem}; {_CELLS_REMEDY}")
        if row:
            yield row


def _require_table(first: str) -> None:
    """Raise _FormatError for a file whose first line is that of a web page or of JSON."""
    if first.lower().lstrip().startswith(("<!doctype html", "<html")):
        raise _FormatError("is a web page; download the file that the page shows")
    try:
        is_object = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return
    if is_object:
        raise _FormatError("holds a JSON object per line; rename it to .jsonl")


def _plain_chunks(lines: Iterator[str]) -> Iterator[pa.Table]:
    blank = 0
    for chunk in _chunked(lines, len):
        texts = [""] * blank + [line.removesuffix("\n").removesuffix("\r") for line in chunk]
        blank = sum(1 for _ in itertools.takewhile(lambda text: not text, reversed(texts)))
        if blank < len(texts):
            yield pa.table({"text": pa.array(texts[: len(texts) - blank], pa.string())})


def _sentence_chunks(lines: Iterator[str]) -> Iterator[pa.Table]:
    """A row for each sentence of CoNLL: `words`, the first column of its lines, and `tags`, the last of several."""
    columns = 0
    sentence: list[list[str]] = []

    def table_of(sentences: list[list[list[str]]]) -> pa.Table:
        numbers = {"words": 0, "tags": -1} if columns > 1 else {"words": 0}
        cells = {name: [[line[n] for line in sentence] for sentence in sentences] for name, n in numbers.items()}
        return pa.table({name: pa.array(column, pa.list_(pa.string())) for name, column in cells.items()})

    for chunk in _line_chunks(lines):
        sentences = []
        for number, line in chunk:
            cells = re.split(r"[ \t]+", line.strip(" \t\r\n"))
            if cells[0] not in ("", _DOCUMENT):
                columns = columns or len(cells)
                if len(cells) != columns:
                    raise _LineError(number, f"has {len(cells)} columns, the lines before it have {columns}")
                sentence.append(cells)
            elif sentence:
                sentences.append(sentence)
                sentence = []
        if sentences:
            yield table_of(sentences)
    if sentence:
        yield table_of([sentence])


def _json_chunks(lines: Iterator[str]) -> Iterator[pa.Table]:
    """A row for each line, a JSON object; a key that it lacks is null."""
    for chunk in _line_chunks(lines):
        rows, numbers = [], []
        for number, line in chunk:
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_unique_object)
            except json.JSONDecodeError as error:
                raise _LineError(number, f"{error.msg} at character {error.colno}") from error
            except (ValueError, RecursionError) as error:
                raise _LineError(number, str(error)) from error
            if not isinstance(row, dict):
                raise _LineError(number, "not an object")
            rows.append(row)
            numbers.append(number)
        if rows:
            yield _table_of(rows, numbers)


def _table_of(rows: list[dict[str, Any]], lines: list[int]) -> pa.Table:
    """Rows with a column for each key; raise _LineError if the values of a key are of several types."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except _NO_COLUMN as error:
            # The malformed line is the first whose value no column can hold with the values before it.
            last = bisect_left(range(len(values)), True, key=lambda last: _obstacle(values[: last + 1]) is not None)
            reason = _obstacle(values[last : last + 1])
            if reason is None:
                text = f"values of {name!r} have different types: {_obstacle(values[: last + 1])}"
            else:  # e.g. half of a character, a huge number, or a list of several types
                text = f"the value of {name!r} cannot be read: {reason}"
            raise _LineError(lines[last], text, name) from error
    return pa.table(columns)


def _obstacle(values: list[Any]) -> str | None:
    try:
        pa.array(values)
    except _NO_COLUMN as error:
        return str(error)
    return None


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raise ValueError for a repeated key, of which `json` would silently keep the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is repeated")
    return values


class _FormatError(ValueError):
    """A file is not of the format that its name says; the message names the format, and what to do."""


class _LineError(ValueError):
    """A line of a file is malformed, counted from 1; `column` names the malformed value, where it is one."""

    def __init__(self, line: int, reason: str, column: str | None = None) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line, self.column = line, column


class TextFile:
    """The text of a binary file, without its byte order mark; the first bytes that are not text are an error.

    UTF-16 and UTF-32 are known by their mark, or by the zero bytes of their first two characters.

    Args:
        path: the file, as error messages name it.
        file: its content, decompressed.
        file_format: the suffix of its format; a line of a table may end in a carriage return alone.

    Attributes:
        encoding: encoding of the file.
        has_mark: whether the file begins with a byte order mark.

    Raises:
        InputError: the file is not text.
    """

    def __init__(self, path: Path, file: BinaryIO, file_format: str) -> None:
        self._path = path
        head = cast("io.BufferedReader", file).peek(_READ_BYTES)
        if (problem := next((_SIGNATURES[first] for first in _SIGNATURES if head.startswith(first)), None)) is not None:
            raise self._error(problem)
        mark = next((mark for mark in _MARKS if head.startswith(mark)), b"")
        zeros = tuple(byte == 0 for byte in head[:4])
        self.encoding, self.has_mark = _MARKS.get(mark, "utf-8"), bool(mark)
        if not mark and zeros in ((False, True, False, True), (True, False, True, False)):
            self.encoding = "utf-16-le" if zeros[1] else "utf-16-be"
        file.read(len(mark))
        self._file, self._newline = file, "" if file_format in TABLES else "\n"

    def lines(self) -> Iterator[str]:
        """The lines with their ends; closes the file.

        Raises:
            InputError: a line is not text of the encoding, or holds a zero byte; the message names it.
        """
        number = 0
        try:
            with io.TextIOWrapper(self._file, self.encoding, newline=self._newline) as lines:
                for number, line in enumerate(lines, 1):
                    if "\0" in line:
                        problem = f"line {number} holds a zero byte and is not text; save the file as UTF-8"
                        raise self._error(problem, line=number)
                    yield line
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode(self.encoding, errors="ignore")
            number += before.count("\n") + 1
            raise self._error(f"line {number} is not {self._encoding_problem(error)}", line=number) from error

    def _encoding_problem(self, error: UnicodeDecodeError) -> str:
        content: bytes = error.object
        if self.encoding != "utf-8":
            return f"{self.encoding.upper()}, which the file begins with; save the file as UTF-8"
        if error.reason == "unexpected end of data":
            return "UTF-8: the file ends within a character; it is cut off, so copy or download it again"
        high, single = len(_HIGH.findall(content)), _SINGLE.findall(content)
        valid = _HIGH.findall(content.decode(errors="ignore").encode())
        if len(valid) > high - len(valid):
            return f"UTF-8 (byte 0x{content[error.start]:02x}), but other lines are; correct the line"
        known = len(_LATIN.findall(content))
        if len(single) * 2 <= len(_RUNS.findall(content)) or known < _LEAST_KNOWN * high:
            return "UTF-8, and its encoding is unknown; save the file as UTF-8"
        title, name = ("Windows-1252", "WINDOWS-1252") if _CONTROL.search(content) else ("Latin-1", "LATIN1")
        word = content[max(0, error.start - 12) : error.start + 12].splitlines()
        shown = next((part for part in word if _SINGLE.search(part)), b"").decode(title, errors="replace").strip()
        return f"UTF-8; it looks like {title} ({shown!r}): convert it by {self._conversion(name)}"

    def _conversion(self, name: str) -> str:
        path, suffix = self._path, self._path.suffix
        unpacked = path.with_suffix("") if suffix.lower() in PACKED else path
        out = shlex.quote(str(unpacked.with_name(f"{unpacked.stem}.utf8{unpacked.suffix}")))
        source = shlex.quote(str(path))
        if unpacked is path:
            return f"iconv -f {name} -t UTF-8 {source} > {out}"
        return f"{_UNPACKERS[suffix.lower()]} {source} | iconv -f {name} -t UTF-8 > {out}"

    def _error(self, problem: str, **details: int) -> InputError:
        return InputError(f"{self._path}: {problem}", code=ErrorCode.FILE_UNREADABLE, path=self._path, **details)


def is_file_name(source: str) -> bool:
    """Whether `source` names a file of rows or a folder, rather than a data set."""
    path = Path(source)
    return path.exists() or names_row_file(path)


def require_file(source: str) -> None:
    """Raise InputError for a source that names a missing file of rows."""
    if is_file_name(source) and not Path(source).exists():
        text = f"{source}: cannot be read ({os.strerror(errno.ENOENT)}); check the path"
        raise InputError(text, code=ErrorCode.FILE_MISSING, path=Path(source))


def has_tables(folder: Path) -> bool:
    """Whether a folder has files of rows other than plain text, which may serve another purpose."""
    return any(_format(path) in ROW_FORMATS and _format(path) != PLAIN_TEXT for path in folder.iterdir())


def row_files(folder: Path) -> list[Path]:
    """The files of rows in a folder, by name, without hidden ones; raise InputError if there are none."""
    files = [path for path in folder.iterdir() if _format(path) in ROW_FORMATS and not path.name.startswith(".")]
    if not files:
        text = f"{folder}: has no files of rows ({_known()}); name the folder that holds them, or a file"
        raise InputError(text, code=ErrorCode.FILE_MISSING, path=folder)
    return sorted(files)


def stem_of(path: Path) -> str:
    """The name of a file without its suffixes: `train` of `train.tsv.xz`."""
    return Path(path.stem).stem if path.suffix.lower() in PACKED else path.stem


def read_rows(files: Sequence[Path], *, in_memory: int = IN_MEMORY_BYTES) -> tuple[Dataset, RowOrigin]:
    """The rows of files, one file after another, and their origin; cells of TSV and CSV are text.

    The first rows of TSV and CSV determine their separators and quotes (`table_dialect`). Lines of plain text are rows
    with a column `text`. Many rows are memory-mapped (`RowStore`). `info.builder_name` of the rows is the format of the
    files, and `info.description` says why a table seems to lack a line with the names of its columns.

    Args:
        files: files with the same columns.
        in_memory: bytes of rows that are kept in memory.

    Raises:
        InputError: a file is missing, of an unknown format, damaged, not text, ragged, without rows, or has different
            columns than the first; the message names the line.
    """
    store, path = RowStore(in_memory), files[0]
    columns: tuple[str, ...] = ()
    counts: list[int] = []
    doubts: list[str] = []
    try:
        for path in files:
            names, count, doubt = _add(store, path)
            counts.append(count)
            doubts.append(doubt)
            columns = columns or names
            if set(names) != set(columns):
                listed = [", ".join(" ".join(name.split()) for name in group) for group in (names, columns)]
                text = (
                    f"{path}: its columns are {listed[0]}, those of {files[0].name} are {listed[1]}; rows of one folder"
                    " need the same columns"
                )
                details = {"path": path, "columns": names, "expected": columns}
                raise InputError(text, code=ErrorCode.FILE_MISMATCH, **details)
        rows = store.finish()
        formats = set(map(_format, files))
        if len(formats) == 1:
            rows.info.builder_name = formats.pop()
            rows.info.description = doubts[0]
        return rows, RowOrigin(tuple(zip(files, counts, strict=True)))
    except _FormatError as error:
        raise InputError(f"{path}: {error}", code=ErrorCode.FILE_UNREADABLE, path=path, reason=str(error)) from error
    except _NO_COLUMN as error:
        remedy = "write or download the file again" if _format(path) == PARQUET else "correct the file"
        text = f"{path}: cannot be read as {_format(path)[1:]} ({one_line(error)}); {remedy}"
        location = {"line": error.line, "column": error.column} if isinstance(error, _LineError) else {}
        details = {"path": path, "reason": one_line(error), **location}
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, **details) from error
    finally:
        store.close()


def _add(store: RowStore, path: Path) -> tuple[tuple[str, ...], int, str]:
    """Add the rows of a file to a store; returns its columns, the number of its rows, and `_header_doubt`."""
    columns: dict[str, None] = {}
    rows, doubt = 0, ""
    for table in _chunks(path):
        names = table.column_names
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            text = f"{path}: two columns are named {repeated[0]!r}; rename one"
            raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=path, column=repeated[0])
        columns |= dict.fromkeys(names)
        if not rows and _format(path) in TABLES:
            doubt = _header_doubt(path, table)
        rows += table.num_rows
        store.add(table)
    if not rows:
        text = f"{path}: has no rows; give a file with at least one row"
        raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, path=path, rows=0)
    return tuple(columns), rows, doubt


def _header_doubt(path: Path, table: pa.Table) -> str:
    """Why the first line of a table seems to be a row, and what to do; empty if it may name columns."""
    evidence = header_evidence(table)
    if evidence is None:
        return ""
    with _open(path) as file:
        text = TextFile(path, file, _format(path))
        is_plain = path.suffix.lower() not in PACKED and text.encoding == "utf-8" and not text.has_mark
        names = _dialect_of(text.lines(), _format(path))[0].separator.join(proposed_names(table))
    line = names.replace("\t", "\\t")
    example = f"sed -i {shlex.quote(f'1i {line}')} {shlex.quote(str(path))}" if is_plain else f"such as {line}"
    return f"the first line seems to be a row ({evidence}); add a line with names before it ({example})"


def _open(path: Path) -> Any:
    return _OPENERS.get(path.suffix.lower(), Path.open)(path, "rb")


def _chunks(path: Path) -> Iterator[pa.Table]:
    """The rows of a file, chunk by chunk; raise InputError if it cannot be read, ValueError if it is malformed."""
    file_format = _format(path)
    if file_format not in ROW_FORMATS or (file_format == PARQUET and path.suffix.lower() in PACKED):
        text = f"{path}: unknown format of rows; rename or convert the file to {_known()}"
        raise InputError(text, code=ErrorCode.INVALID_VALUE, path=path)
    try:
        with _open(path) as file:
            yield from _parse(path, file_format, cast("BinaryIO", file))
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        text = f"{path}: is damaged and cannot be decompressed ({one_line(error)}); download it again"
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=path, reason=one_line(error)) from error
    except OSError as error:
        if error.errno is None:  # Arrow's error for damaged content
            raise ValueError(str(error)) from error
        code = ErrorCode.FILE_MISSING if isinstance(error, FileNotFoundError) else ErrorCode.FILE_UNREADABLE
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path", code=code, path=path) from error


def _format(path: Path) -> str:
    """The suffix that names the format: `.tsv` of `rows.tsv.xz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in PACKED else path.suffix.lower()


def _known() -> str:
    return f"{', '.join(ROW_FORMATS)}, all but the last optionally with .xz or .gz"
