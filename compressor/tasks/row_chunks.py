"""Parse files of rows chunk by chunk, so that a file may exceed the memory.

Tables are read by Arrow, on which `datasets` is built. The CSV builder of `datasets` uses pandas, which silently fills
rows that are too short and uses the first column of rows that are too long as an index. JSON is read by Python, because
Arrow's reader, which the JSON builder calls, ends the process on some malformed lines.
"""

from __future__ import annotations

import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from compressor.config.values import PARQUET, PLAIN_TEXT
from compressor.tasks.table_dialect import Dialect, find_dialect
from compressor.tasks.text_file import FormatError, LineError, TextFile

_CHUNK_BYTES = 2**21
"""Size of what is parsed at once; a row may not be longer."""
_SAMPLE_BYTES = 2**16
"""Size of the first rows of a table by which its separator is known."""
_SEPARATOR_LINE = re.compile(rb'"?sep=([ -~\t])"?\r?\n')
"""First line of a table that names its separator, as spreadsheets write it."""
_DOCUMENT = "-DOCSTART-"
"""First column of the lines of CoNLL between documents."""
_NO_COLUMN = (pa.ArrowException, ValueError, TypeError, OverflowError)
"""Errors of Arrow where values cannot be a column."""


def parse_chunks(path: Path, file_format: str, file: BinaryIO) -> Iterator[pa.Table]:
    """The rows of a file as tables, one after another; none if it has no rows.

    Args:
        path: the file, as error messages name it.
        file_format: one of `ROW_FORMATS`.
        file: its content, decompressed.

    Raises:
        LineError: a line is malformed.
        FormatError: the content is not of the format.
        InputError: the content is not text.
        ValueError: the content is malformed; `pyarrow.ArrowException` is one of these.
    """
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


def dialect_of(text: TextFile, suffix: str) -> Dialect:
    """The dialect of a table, by its first rows; a first line that names the separator is passed over.

    Args:
        text: the file, nothing of which was read.
        suffix: `.csv` or `.tsv`.
    """
    named = _SEPARATOR_LINE.match(text.head())
    if named is not None:
        text.skip_line()
        return Dialect(named.group(1).decode(), True)
    head = text.head()
    sample = head[:_SAMPLE_BYTES].decode(errors="ignore")
    return find_dialect(sample, suffix, is_whole=len(head) <= _SAMPLE_BYTES)


def _table_chunks(text: TextFile, suffix: str) -> Iterator[pa.Table]:
    """The rows of a table; the first chunk has the columns, if no rows."""
    if text.is_blank():
        return
    _require_table(text.head())
    dialect = dialect_of(text, suffix)
    if dialect.obstacle is not None:
        raise FormatError(dialect.obstacle)
    if dialect.is_quoted:
        text.follow_quotes(dialect.separator)
    try:
        yield from _parsed_tables(text, dialect)
    except pa.ArrowInvalid as error:
        _require_closed_quotes(text)
        if "straddling" in str(error):
            raise ValueError(f"a row is longer than {_CHUNK_BYTES >> 20} MiB") from error
        raise
    _require_closed_quotes(text)


def _require_table(head: bytes) -> None:
    """Raise FormatError for a file that begins as one of another format."""
    first = head.lstrip().split(b"\n", 1)[0]
    if first.lower().startswith((b"<!doctype html", b"<html")):
        raise FormatError("is a web page; download the file that the page shows")
    try:
        is_object = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return
    if is_object:
        raise FormatError("holds a JSON object per line; rename it to .jsonl")


def _require_closed_quotes(text: TextFile) -> None:
    """Raise LineError where the quotes of CSV are open at the end: Arrow takes the rest of the file as one cell."""
    line = text.open_line
    if line is not None:
        raise LineError(line, "a quote is opened here and not closed")


def _parsed_tables(text: TextFile, dialect: Dialect) -> Iterator[pa.Table]:
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


def _plain_chunks(text: TextFile) -> Iterator[pa.Table]:
    """One row per line, without the blank lines at the end."""
    if text.is_blank():
        return
    blank = 0
    for _, chunk in _line_chunks(text):
        lines = [""] * blank + [line.removesuffix("\r") for line in chunk.split("\n")]
        blank = sum(1 for _ in itertools.takewhile(lambda line: not line, reversed(lines)))
        if blank < len(lines):
            yield pa.table({"text": pa.array(lines[: len(lines) - blank], pa.string())})


def _sentence_chunks(text: TextFile) -> Iterator[pa.Table]:
    """One row per sentence of CoNLL: `words`, the first column of its lines, and `tags`, the last of several."""
    columns = 0
    sentence: list[list[str]] = []
    for first, chunk in _line_chunks(text):
        sentences = []
        for number, line in enumerate(chunk.split("\n"), first):
            cells = re.split(r"[ \t]+", line.strip(" \t\r"))
            if cells[0] not in ("", _DOCUMENT):
                columns = columns or len(cells)
                if len(cells) != columns:
                    raise LineError(number, f"has {len(cells)} columns, the lines before it have {columns}")
                sentence.append(cells)
            elif sentence:
                sentences.append(sentence)
                sentence = []
        yield from _tables_of_sentences(sentences, has_tags=columns > 1)
    yield from _tables_of_sentences([sentence] if sentence else [], has_tags=columns > 1)


def _tables_of_sentences(sentences: list[list[list[str]]], *, has_tags: bool) -> Iterator[pa.Table]:
    """The table of some sentences; none without sentences."""
    if sentences:
        numbers = {"words": 0, **({"tags": -1} if has_tags else {})}
        cells = pa.list_(pa.string())
        yield pa.table(
            {
                name: pa.array([[line[number] for line in sentence] for sentence in sentences], cells)
                for name, number in numbers.items()
            }
        )


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
    """The rows of a text with one JSON object per line; a key that a line lacks is null in its row."""
    for first, chunk in _line_chunks(text):
        rows, lines = [], []
        for number, line in enumerate(chunk.split("\n"), first):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_unique_object)
            except json.JSONDecodeError as error:
                raise LineError(number, f"{error.msg} at character {error.colno}") from error
            except (ValueError, RecursionError) as error:
                raise LineError(number, str(error)) from error
            if not isinstance(row, dict):
                raise LineError(number, "not an object")
            rows.append(row)
            lines.append(number)
        if rows:
            yield _table_of(rows, lines)


def _table_of(rows: list[dict[str, Any]], lines: list[int]) -> pa.Table:
    """Rows with a column for each key; raise LineError if the values of a key are of several types."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except _NO_COLUMN as error:
            # The line is the first whose value no column can hold together with those before it.
            last = bisect_left(range(len(values)), True, key=lambda last: _obstacle(values[: last + 1]) is not None)
            reason = _obstacle(values[last : last + 1])
            if reason is None:
                text = f"values of {name!r} have different types: {_obstacle(values[: last + 1])}"
            else:  # e.g. half of a character, a huge number, or a list of several types
                text = f"the value of {name!r} cannot be read: {reason}"
            raise LineError(lines[last], text, name) from error
    return pa.table(columns)


def _obstacle(values: list[Any]) -> str | None:
    """Why values of JSON cannot be a column; None: they can."""
    try:
        pa.array(values)
    except _NO_COLUMN as error:
        return str(error)
    return None


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raise ValueError if a key is repeated, of which `json` would silently keep the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is repeated")
    return values
