"""Files of rows as data sets in memory: TSV, CSV, JSON lines and plain text, each also packed as `.xz` or `.gz`.

The readers are Arrow's, which `datasets` is built on. Its own CSV builder is pandas', which fills rows that are too
short and takes the first column of rows that are too long for an index, both without a word.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
from datasets import Dataset

from compressor.errors import InputError
from compressor.folder.quiet import one_line

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
    # One block: a row is never cut in two, and a type is inferred from the whole column.
    block = len(content) + 1
    if kind == ".jsonl":
        return pyarrow.json.read_json(
            pa.BufferReader(content), read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=block)
        )
    quoted = kind == ".csv"
    return pyarrow.csv.read_csv(
        pa.BufferReader(content),
        read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=block),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter="," if quoted else "\t",
            quote_char='"' if quoted else False,
            double_quote=quoted,
            newlines_in_values=quoted,
        ),
        convert_options=pyarrow.csv.ConvertOptions(default_column_type=pa.string(), strings_can_be_null=False),
    )
