"""Files of rows as data sets in memory: TSV, CSV, JSON lines and plain text, each also packed as `.xz` or `.gz`.

Tables are read by Arrow, which `datasets` is built on. Its own CSV builder is pandas', which fills rows that are too
short and takes the first column of rows that are too long for an index, both without a word. JSON is read by Python:
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

from compressor.errors import InputError
from compressor.silence_libraries import one_line

_UNPACK: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}
_FORMATS = (".tsv", ".csv", ".jsonl", ".txt")


def is_file_name(source: str) -> bool:
    """Whether `source` names a file of rows, not a data set."""
    path = Path(source)
    return path.exists() or _format(path) in _FORMATS or path.suffix in _UNPACK


def read_file(path: Path) -> Dataset:
    """Every row of a file, columns as the file names them; the cells of TSV and CSV are text.

    TSV knows no quotes: what lies between two tabs is the cell. Plain text is one column `text`, one row a line.

    Raises:
        InputError: the file is missing, unknown, damaged, not UTF-8, ragged, or holds no row; one line says where.
    """
    kind = _format(path)
    if kind not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise InputError(f"{path}: rows come as {known}, each also .xz or .gz; rename or convert the file")
    content = _unpacked(path)
    _check_text(path, content)
    try:
        table = _parse(kind, content)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise InputError(f"{path}: cannot be read as {kind[1:]} ({one_line(error)}); mend the file") from error
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{path}: two columns are named {twice[0]!r}; rename one")
    if not table.num_rows:
        raise InputError(f"{path}: holds no row; give a file with at least one")
    try:
        return Dataset(table)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise InputError(f"{path}: its columns cannot be used ({one_line(error)}); mend the file") from error


def _format(path: Path) -> str:
    """The ending that says the format: `.tsv` of `rows.tsv.xz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in _UNPACK else path.suffix.lower()


def _unpacked(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        content = _UNPACK[path.suffix.lower()](raw) if path.suffix.lower() in _UNPACK else raw
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: is damaged and cannot be unpacked ({one_line(error)}); fetch it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error
    return content.removeprefix(b"\xef\xbb\xbf")


def _check_text(path: Path, content: bytes) -> None:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}: line {line} is not UTF-8; save the file as UTF-8") from error
    if b"\x00" in content:
        line = content.count(b"\n", 0, content.index(b"\x00")) + 1
        raise InputError(f"{path}: line {line} holds a zero byte, so it is not text; save the file as UTF-8")


def _parse(kind: str, content: bytes) -> pa.Table:
    if not content.strip():
        return pa.table({})
    if kind == ".txt":
        return pa.table({"text": pa.array(content.decode().rstrip("\n").split("\n"), pa.string())})
    if kind == ".jsonl":
        return _parse_json(content.decode())
    quoted = kind == ".csv"
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
    """One object a line; a name that a line lacks is empty there."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is no object")
        rows.append(row)
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"values of {name!r} do not go together: {error}") from error
    return pa.table(columns)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found
