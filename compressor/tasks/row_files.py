"""Read rows from a file, or from the files of a folder, into a data set that may exceed the memory."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
from datasets import Dataset

from compressor.config.values import PACKED, PARQUET, PLAIN_TEXT, ROW_FORMATS, TABLES, names_row_file
from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line
from compressor.tasks.row_chunks import FormatError, LineError, TextFile, dialect_of, parse_chunks
from compressor.tasks.row_origin import RowOrigin
from compressor.tasks.row_store import IN_MEMORY_BYTES, RowStore
from compressor.tasks.table_dialect import header_evidence, proposed_names

_OPENERS: Mapping[str, Callable[[Path], Any]] = dict(zip(PACKED, (lzma.open, gzip.open), strict=True))


def is_file_name(source: str) -> bool:
    """Whether `source` names a file of rows, or a folder of them, rather than a data set."""
    path = Path(source)
    return path.exists() or names_row_file(path)


def require_file(source: str) -> None:
    """Raise InputError for a source that names a file of rows which does not exist."""
    if is_file_name(source) and not Path(source).exists():
        raise InputError(
            f"{source}: cannot be read ({os.strerror(errno.ENOENT)}); check the path",
            code=ErrorCode.FILE_MISSING,
            path=Path(source),
        )


def has_tables(folder: Path) -> bool:
    """Whether a folder holds files of rows with columns; plain text may lie anywhere for another purpose."""
    return any(_format(path) in ROW_FORMATS and _format(path) != PLAIN_TEXT for path in folder.iterdir())


def row_files(folder: Path) -> list[Path]:
    """The files of rows in a folder, by name; files of other formats and hidden ones are left out.

    Raises:
        InputError: there are none.
    """
    files = [path for path in folder.iterdir() if _format(path) in ROW_FORMATS and not path.name.startswith(".")]
    if not files:
        raise InputError(
            f"{folder}: has no files of rows ({_known()}); name the folder that holds them, or a file",
            code=ErrorCode.FILE_MISSING,
            path=folder,
        )
    return sorted(files)


def stem_of(path: Path) -> str:
    """The name of a file without its suffixes: `train` of `train.tsv.xz`."""
    return Path(path.stem).stem if path.suffix.lower() in PACKED else path.stem


def read_rows(files: Sequence[Path], *, in_memory: int = IN_MEMORY_BYTES) -> tuple[Dataset, RowOrigin]:
    """Every row of some files, one file after another, and their origin; cells of TSV and CSV are text.

    Separators and quotes of TSV and CSV are those of the first rows, whatever the name (`table_dialect`). Plain text is
    one column `text`, one row per line. Files are parsed chunk by chunk, and many rows are memory-mapped (`RowStore`).
    `info.builder_name` of the rows is the format of the files, and `info.description` why a table seems to lack a line
    with the names of its columns.

    Args:
        files: files with the same columns.
        in_memory: bytes of rows that are kept in memory.

    Raises:
        InputError: a file is missing, of an unknown format, damaged, no text, ragged, without rows, or has other
            columns than the first one; the message names the line.
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
                raise _columns_differ_error(path, names, files[0], columns)
        rows = store.finish()
        formats = set(map(_format, files))
        if len(formats) == 1:
            rows.info.builder_name = formats.pop()
            rows.info.description = doubts[0]
        return rows, RowOrigin(tuple(zip(files, counts, strict=True)))
    except FormatError as error:
        raise InputError(f"{path}: {error}", code=ErrorCode.FILE_UNREADABLE, path=path, reason=str(error)) from error
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"{path}: cannot be read as {_format(path)[1:]} ({one_line(error)}); {_remedy(path, str(error))}",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
            reason=one_line(error),
            **({"line": error.line, "column": error.column} if isinstance(error, LineError) else {}),
        ) from error
    finally:
        store.close()


def _add(store: RowStore, path: Path) -> tuple[tuple[str, ...], int, str]:
    """Add the rows of a file to a store; return its columns, the number of its rows, and `_header_doubt`."""
    columns: dict[str, None] = {}
    rows, doubt = 0, ""
    for table in _chunks(path):
        names = table.column_names
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(
                f"{path}: two columns are named {repeated[0]!r}; rename one",
                code=ErrorCode.FILE_UNREADABLE,
                path=path,
                column=repeated[0],
            )
        columns |= dict.fromkeys(names)
        if not rows and table.num_rows and _format(path) in TABLES:
            doubt = _header_doubt(path, table)
        rows += table.num_rows
        store.add(table)
    if not rows:
        raise InputError(
            f"{path}: has no rows; give a file with at least one", code=ErrorCode.TOO_FEW_ROWS, path=path, rows=0
        )
    return tuple(columns), rows, doubt


def _header_doubt(path: Path, table: pa.Table) -> str:
    """Why the first line of a table seems to be a row, and what to do; empty where it may name columns."""
    evidence = header_evidence(table)
    if evidence is None:
        return ""
    with _open(path) as file:
        text = TextFile(path, file)
        is_plain = path.suffix.lower() not in PACKED and text.encoding == "utf-8" and not text.has_mark
        names = dialect_of(text, _format(path)).separator.join(proposed_names(table))
    line = names.replace("\t", "\\t")
    example = f"sed -i {shlex.quote(f'1i {line}')} {shlex.quote(str(path))}" if is_plain else f"such as {line}"
    return f"the first line seems to be a row ({evidence}); add a line with names before it ({example})"


def _open(path: Path) -> Any:
    """A file of rows, decompressed."""
    return _OPENERS.get(path.suffix.lower(), Path.open)(path, "rb")


def _chunks(path: Path) -> Iterator[pa.Table]:
    """The rows of a file, chunk by chunk.

    Raises:
        InputError: the file is missing, damaged, or of an unknown format.
        ValueError: its content is malformed.
    """
    file_format = _format(path)
    if file_format not in ROW_FORMATS or (file_format == PARQUET and path.suffix.lower() in PACKED):
        raise InputError(
            f"{path}: unknown format of rows; rename or convert the file to {_known()}",
            code=ErrorCode.INVALID_VALUE,
            path=path,
        )
    try:
        with _open(path) as file:
            yield from parse_chunks(path, file_format, cast("BinaryIO", file))
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}: is damaged and cannot be decompressed ({one_line(error)}); download it again",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
            reason=one_line(error),
        ) from error
    except OSError as error:
        if error.errno is None:  # Arrow raises these for damaged content
            raise ValueError(str(error)) from error
        code = ErrorCode.FILE_MISSING if isinstance(error, FileNotFoundError) else ErrorCode.FILE_UNREADABLE
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path", code=code, path=path) from error


def _columns_differ_error(path: Path, names: Iterable[str], first: Path, columns: Iterable[str]) -> InputError:
    """The error for a file of a folder whose columns are not those of the first file."""
    listed = [", ".join(" ".join(name.split()) for name in group) for group in (names, columns)]
    return InputError(
        f"{path}: its columns are {listed[0]}, those of {first.name} are {listed[1]}; rows of one folder need the same"
        " columns",
        code=ErrorCode.FILE_MISMATCH,
        path=path,
        columns=tuple(names),
        expected=tuple(columns),
    )


def _remedy(path: Path, reason: str) -> str:
    """How to correct a file whose content is malformed."""
    if _format(path) in TABLES and "columns, got" in reason:
        return "correct the row; a cell with a separator or a line end needs quotes around it"
    return "write or download the file again" if _format(path) == PARQUET else "correct the file"


def _format(path: Path) -> str:
    """The suffix that names the format: `.tsv` of `rows.tsv.xz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in PACKED else path.suffix.lower()


def _known() -> str:
    return f"{', '.join(ROW_FORMATS)}, all but the last optionally with .xz or .gz"
