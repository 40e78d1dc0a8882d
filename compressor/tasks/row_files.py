"""Read files of rows into data sets in memory: TSV, CSV, JSON lines and plain text, optionally with `.xz` or `.gz`.

Tables are read by Arrow, on which `datasets` is built. The CSV builder of `datasets` uses pandas, which silently fills
rows that are too short and uses the first column of rows that are too long as an index. JSON is read by Python, because
Arrow's reader, which the JSON builder calls, ends the process on some malformed lines.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
from datasets import Dataset

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line

_UNPACK: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}
_FORMATS = (".tsv", ".csv", ".jsonl", ".txt")


class _LineError(ValueError):
    """A line of a file is malformed."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line


def is_file_name(source: str) -> bool:
    """Whether `source` names a file of rows rather than a data set."""
    path = Path(source)
    return path.exists() or _format(path) in _FORMATS or path.suffix in _UNPACK


def read_file(path: Path) -> Dataset:
    """Every row of a file, with the column names of the file; cells of TSV and CSV are text.

    TSV has no quotes: a cell is the text between two tabs. Plain text is one column `text`, one row per line.

    Raises:
        InputError: the file is missing, of an unknown format, damaged, not UTF-8, ragged, or without rows; the message
            names the line.
    """
    file_format = _format(path)
    if file_format not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise InputError(
            f"{path}: unknown format of rows; rename or convert the file to {known}, optionally with .xz or .gz",
            code=ErrorCode.INVALID_VALUE,
            path=path,
        )
    content = _unpack(path)
    _check_text(path, content)
    try:
        table = _parse(file_format, content)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise InputError(
            f"{path}: cannot be read as {file_format[1:]} ({one_line(error)}); correct the file",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
            reason=one_line(error),
            line=error.line if isinstance(error, _LineError) else None,
        ) from error
    names = table.column_names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(
            f"{path}: two columns are named {repeated[0]!r}; rename one",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
            column=repeated[0],
        )
    if not table.num_rows:
        raise InputError(
            f"{path}: has no rows; give a file with at least one", code=ErrorCode.TOO_FEW_ROWS, path=path, rows=0
        )
    try:
        return Dataset(table)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: its columns cannot be used ({one_line(error)}); correct the file",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
            reason=one_line(error),
        ) from error


def _format(path: Path) -> str:
    """The suffix that names the format: `.tsv` of `rows.tsv.xz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in _UNPACK else path.suffix.lower()


def _unpack(path: Path) -> bytes:
    """The decompressed content of a file, without byte order mark; raise InputError if it cannot be read."""
    try:
        raw = path.read_bytes()
        content = _UNPACK[path.suffix.lower()](raw) if path.suffix.lower() in _UNPACK else raw
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}: is damaged and cannot be decompressed ({one_line(error)}); download it again",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
            reason=one_line(error),
        ) from error
    except OSError as error:
        code = ErrorCode.FILE_MISSING if isinstance(error, FileNotFoundError) else ErrorCode.FILE_UNREADABLE
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); check the path", code=code, path=path
        ) from error
    return content.removeprefix(b"\xef\xbb\xbf")


def _check_text(path: Path, content: bytes) -> None:
    """Raise InputError unless `content` is UTF-8 text without zero bytes."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}: line {line} is not UTF-8; save the file as UTF-8",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
            line=line,
        ) from error
    if b"\x00" in content:
        line = content.count(b"\n", 0, content.index(b"\x00")) + 1
        raise InputError(
            f"{path}: line {line} holds a zero byte and is not text; save the file as UTF-8",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
            line=line,
        )


def _parse(file_format: str, content: bytes) -> pa.Table:
    """The table in a file's content; empty without content."""
    if not content.strip():
        return pa.table({})
    if file_format == ".txt":
        return pa.table({"text": pa.array(content.decode().rstrip("\n").split("\n"), pa.string())})
    if file_format == ".jsonl":
        return _parse_json(content.decode())
    quoted = file_format == ".csv"
    return pyarrow.csv.read_csv(
        pa.BufferReader(content),
        read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=len(content) + 1),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter="," if quoted else "\t",
            quote_char='"' if quoted else False,
            double_quote=quoted,
            newlines_in_values=quoted,
        ),
        convert_options=pyarrow.csv.ConvertOptions(default_column_type=pa.string(), strings_can_be_null=False),
    )


def _parse_json(text: str) -> pa.Table:
    """The table of a text with one JSON object per line; a key that a line lacks is null in its row.

    Raises:
        _LineError: a line is not an object.
        ValueError: the values of a key are of several types.
    """
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_unique_object)
        except (ValueError, RecursionError) as error:
            raise _LineError(number, str(error)) from error
        if not isinstance(row, dict):
            raise _LineError(number, "not an object")
        rows.append(row)
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"values of {name!r} have different types: {error}") from error
    return pa.table(columns)


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raise ValueError if a key is repeated, of which `json` would silently keep the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is repeated")
    return values
