"""Read rows from a file, or from the files of a folder, into a data set that may exceed the memory.

Files are parsed chunk by chunk, and their content is checked to be text. Arrow reads tables, since the CSV builder of
`datasets` uses pandas, which silently fills short rows and takes the first column of long rows as an index. Python
reads JSON, since Arrow's reader, which the JSON builder of `datasets` calls, ends the process on some malformed lines.
"""

from __future__ import annotations

import codecs
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
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from datasets import Dataset

from compressor.config.values import PACKED, PARQUET, PLAIN_TEXT, ROW_FORMATS, TABLES, names_row_file
from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line
from compressor.tasks.row_store import IN_MEMORY_BYTES, RowOrigin, RowStore
from compressor.tasks.table_dialect import Dialect, find_dialect, header_evidence, proposed_names

_CHUNK_BYTES = 2**21  # bytes that are parsed at once; a row may not be longer
_SAMPLE_BYTES = 2**16  # bytes of the first rows of a table, by which its separator is known
_SEPARATOR_LINE = re.compile(rb'"?sep=([ -~\t])"?\r?\n')
"""First line in which spreadsheets name the separator of a table."""
_DOCUMENT = "-DOCSTART-"  # first column of the lines that separate documents in CoNLL
_NO_COLUMN = (pa.ArrowException, ValueError, TypeError, OverflowError)
"""Errors of Arrow for values that cannot be a column."""
_READ_BYTES = 2**20
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
_QUOTES = re.compile(rb'"+')
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
    text = TextFile(path, file)
    if file_format == PLAIN_TEXT:
        yield from _plain_chunks(text)
    elif file_format == ".jsonl":
        yield from _json_chunks(text)
    elif file_format == ".conll":
        yield from _sentence_chunks(text)
    else:
        yield from _table_chunks(text, file_format)


def _dialect_of(text: TextFile, suffix: str) -> Dialect:
    """The dialect of a table, by its first rows; a first line that names the separator is skipped."""
    if (named := _SEPARATOR_LINE.match(text.ahead)) is not None:
        text.ahead = text.ahead.partition(b"\n")[2]
        return Dialect(named.group(1).decode(), True)
    sample = text.ahead[:_SAMPLE_BYTES].decode(errors="ignore")
    return find_dialect(sample, suffix, is_whole=len(text.ahead) <= _SAMPLE_BYTES)


def _table_chunks(text: TextFile, suffix: str) -> Iterator[pa.Table]:
    """The rows of a table; the first chunk may have columns alone."""
    if text.is_blank():
        return
    _require_table(text.ahead)
    dialect = _dialect_of(text, suffix)
    if dialect.obstacle is not None:
        raise _FormatError(dialect.obstacle)
    if dialect.is_quoted:
        text.follow_quotes(dialect.separator)
    try:
        reader = pyarrow.csv.open_csv(
            pa.PythonFile(text, "r"),
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_CHUNK_BYTES),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=dialect.separator,
                quote_char='"' if dialect.is_quoted else False,
                double_quote=dialect.is_quoted,
                newlines_in_values=dialect.is_quoted,
            ),
            convert_options=pyarrow.csv.ConvertOptions(default_column_type=pa.string(), strings_can_be_null=False),
        )
        names = [name.strip() or f"column {number}" for number, name in enumerate(reader.schema.names, 1)]
        yield reader.schema.empty_table().rename_columns(names)
        for batch in reader:
            yield pa.Table.from_batches([batch]).rename_columns(names)
    except pa.ArrowInvalid as error:
        text.require_closed_quotes()
        if "straddling" in str(error):
            raise ValueError(f"a row is longer than {_CHUNK_BYTES >> 20} MiB") from error
        raise
    text.require_closed_quotes()


def _require_table(head: bytes) -> None:
    """Raise _FormatError for a file that begins like a web page or JSON."""
    first = head.lstrip().split(b"\n", 1)[0]
    if first.lower().startswith((b"<!doctype html", b"<html")):
        raise _FormatError("is a web page; download the file that the page shows")
    try:
        is_object = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return
    if is_object:
        raise _FormatError("holds a JSON object per line; rename it to .jsonl")


def _plain_chunks(text: TextFile) -> Iterator[pa.Table]:
    if text.is_blank():
        return
    blank = 0
    for _, chunk in _line_chunks(text):
        lines = [""] * blank + [line.removesuffix("\r") for line in chunk.split("\n")]
        blank = sum(1 for _ in itertools.takewhile(lambda line: not line, reversed(lines)))
        if blank < len(lines):
            yield pa.table({"text": pa.array(lines[: len(lines) - blank], pa.string())})


def _sentence_chunks(text: TextFile) -> Iterator[pa.Table]:
    """A row for each sentence of CoNLL: `words`, the first column of its lines, and `tags`, the last of several."""
    columns = 0
    sentence: list[list[str]] = []

    def table_of(sentences: list[list[list[str]]]) -> pa.Table:
        numbers = {"words": 0, "tags": -1} if columns > 1 else {"words": 0}
        cells = {name: [[line[n] for line in sentence] for sentence in sentences] for name, n in numbers.items()}
        return pa.table({name: pa.array(column, pa.list_(pa.string())) for name, column in cells.items()})

    for first, chunk in _line_chunks(text):
        sentences = []
        for number, line in enumerate(chunk.split("\n"), first):
            cells = re.split(r"[ \t]+", line.strip(" \t\r"))
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


def _line_chunks(text: TextFile) -> Iterator[tuple[int, str]]:
    """Chunks of whole lines without the last line end, each with the number of its first line."""
    rest: list[bytes] = []
    first = 1
    while chunk := text.read(_CHUNK_BYTES):
        head, end, tail = chunk.rpartition(b"\n")
        if end:
            lines = b"".join([*rest, head]).decode()
            yield first, lines
            first += lines.count("\n") + 1
            rest = []
        rest.append(tail)
    if last := b"".join(rest):
        yield first, last.decode()


def _json_chunks(text: TextFile) -> Iterator[pa.Table]:
    """A row for each line, a JSON object; a key that it lacks is null."""
    for first, chunk in _line_chunks(text):
        rows, lines = [], []
        for number, line in enumerate(chunk.split("\n"), first):
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
            lines.append(number)
        if rows:
            yield _table_of(rows, lines)


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


class TextFile(io.RawIOBase):
    """A binary file as UTF-8 without its byte order mark; reading raises an error at the first bytes that are not text.

    UTF-16 and UTF-32 are known by their mark, or by the zero bytes of their first two characters.

    Args:
        path: the file, as error messages name it.
        file: its content, decompressed.

    Attributes:
        encoding: encoding of the file.
        has_mark: whether the file begins with a byte order mark.
        ahead: the next bytes, which stay to be read; at first at most 1 MiB of the file.

    Raises:
        InputError: the file is not text.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__()
        self._path, self._file, self._lines = path, file, 0
        self._quotes: _Quotes | None = None
        head = file.read(_READ_BYTES)
        if (problem := next((_SIGNATURES[first] for first in _SIGNATURES if head.startswith(first)), None)) is not None:
            raise self._error(problem)
        mark = next((mark for mark in _MARKS if head.startswith(mark)), b"")
        zeros = tuple(byte == 0 for byte in head[:4])
        self.encoding, self.has_mark = _MARKS.get(mark, "utf-8"), bool(mark)
        if not mark and len(head) % 2 == 0 and zeros in ((False, True, False, True), (True, False, True, False)):
            self.encoding = "utf-16-le" if zeros[1] else "utf-16-be"
        self._decoder = codecs.getincrementaldecoder(self.encoding)()
        self.ahead = self._decode(head.removeprefix(mark))

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, at most `size`; empty at the end.

        Raises:
            InputError: they are not text of the encoding, or hold a zero byte; the message names the line.
            _LineError: text follows the quote that closes a cell; see `follow_quotes`.
        """
        # Arrow takes a short read as a block, which must contain the end of a row.
        while (missing := size - len(self.ahead)) > 0 and (fetched := self._fetch(missing)):
            self.ahead += fetched
        if size < 0 and not self.ahead:
            self.ahead = self._fetch(size)
        chunk = self.ahead if size < 0 else self.ahead[:size]
        self.ahead = self.ahead[len(chunk) :]
        if self._quotes is not None:
            self._quotes.follow(chunk)
        return chunk

    def is_blank(self) -> bool:
        """Whether the rest of the file is white space."""
        while not self.ahead.strip():
            chunk = self._fetch(_READ_BYTES)
            if not chunk:
                return True
            self.ahead += chunk
        return False

    def follow_quotes(self, separator: str) -> None:
        """Check quotes from here on."""
        self._quotes = _Quotes(separator.encode(), self._lines - self.ahead.count(b"\n") + 1)

    def require_closed_quotes(self) -> None:
        """Raise _LineError for a quote that is open at the end, from which on Arrow reads a single cell."""
        if self._quotes is not None and (line := self._quotes.open_line) is not None:
            raise _LineError(line, "a quote is opened here and not closed")

    def _fetch(self, size: int) -> bytes:
        """The next bytes of the file as UTF-8; empty only at its end."""
        while raw := self._file.read(size):
            if chunk := self._decode(raw):
                return chunk
        return self._decode(b"")

    def _decode(self, raw: bytes) -> bytes:
        """Bytes of the file as UTF-8, up to the last whole character."""
        try:
            text = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode(self.encoding, errors="ignore")
            line = self._lines + before.count("\n") + 1
            raise self._error(f"line {line} is not {self._encoding_problem(error)}", line=line) from error
        chunk = text.encode()
        if (zero := chunk.find(b"\x00")) >= 0:
            line = self._lines + chunk.count(b"\n", 0, zero) + 1
            raise self._error(f"line {line} holds a zero byte and is not text; save the file as UTF-8", line=line)
        self._lines += chunk.count(b"\n")
        return chunk

    def _encoding_problem(self, error: UnicodeDecodeError) -> str:
        content: bytes = error.object
        if self.encoding != "utf-8":
            return f"{self.encoding.upper()}, which the file begins with; save the file as UTF-8"
        if error.reason == "unexpected end of data":
            return "UTF-8: the file ends within a character; it is cut off, so copy or download it again"
        high, single = len(_HIGH.findall(content)), _SINGLE.findall(content)
        valid = _HIGH.findall(content.decode(errors="ignore").encode())
        if len(valid) > high - len(valid):
            return f"UTF-8 (byte 0x{content[error.start]:02x}), other lines are; correct the line"
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


class _Quotes:
    """Tracks whether a table ends inside quotes.

    A quote opens a cell only at its beginning; two quotes inside a cell are a quote of its text.
    """

    def __init__(self, separator: bytes, line: int = 1) -> None:
        self._ends = (b"\n", b"\r", separator, b"")
        self._open: int | None = None
        self._line, self._last, self._held = line, b"\n", b""

    @property
    def open_line(self) -> int | None:
        """Number of the line with a quote that is not closed at the end; None if all are."""
        self.follow(b"")
        return self._open

    def follow(self, chunk: bytes) -> None:
        """Track the quotes of a chunk, empty at the end; raise _LineError for text after the quote that ends a cell."""
        text = self._held + chunk
        end = len(text.rstrip(b'"')) if chunk else len(text)  # a run of quotes may continue in the next chunk
        text, self._held = text[:end], text[end:]
        counted = 0
        for quotes in _QUOTES.finditer(text):
            begin, is_odd = quotes.start(), len(quotes.group()) % 2
            self._line += text.count(b"\n", counted, begin)
            counted = begin
            before = text[begin - 1 : begin] if begin else self._last
            if self._open is not None:
                closes = bool(is_odd)
                self._open = None if closes else self._open
            elif before in self._ends:
                closes = not is_odd
                self._open = self._line if is_odd else None
            else:
                continue
            if closes and text[quotes.end() : quotes.end() + 1] not in self._ends:
                problem = (
                    "text follows the quote that ends a cell; double the quotes inside of a cell and put quotes around"
                    " it, or remove them"
                )
                raise _LineError(self._line, problem)
        self._line += text.count(b"\n", counted)
        self._last = text[-1:] or self._last


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
        InputError: a file is missing, of an unknown format, damaged, not text, ragged, without rows, or has other
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
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        remedy = "write or download the file again" if _format(path) == PARQUET else "correct the file"
        if _format(path) in TABLES and "columns, got" in str(error):
            remedy = "correct the row; a cell with a separator or a line end needs quotes around it"
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
        if not rows and table.num_rows and _format(path) in TABLES:
            doubt = _header_doubt(path, table)
        rows += table.num_rows
        store.add(table)
    if not rows:
        text = f"{path}: has no rows; give a file with at least one"
        raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, path=path, rows=0)
    return tuple(columns), rows, doubt


def _header_doubt(path: Path, table: pa.Table) -> str:
    """Why the first line of a table seems to be a row, and what to do; empty if it may name columns."""
    evidence = header_evidence(table)
    if evidence is None:
        return ""
    with _open(path) as file:
        text = TextFile(path, file)
        is_plain = path.suffix.lower() not in PACKED and text.encoding == "utf-8" and not text.has_mark
        names = _dialect_of(text, _format(path)).separator.join(proposed_names(table))
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
