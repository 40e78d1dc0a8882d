"""Rows beyond the memory, and the origin of rows: the file of each, and its number there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
from datasets import Dataset
from datasets.fingerprint import generate_random_fingerprint

from compressor.errors import ErrorCode, InputError, RowError

IN_MEMORY_BYTES = 2**26
"""Size of the rows that are kept in memory."""


class RowStore:
    """Concatenates tables to a data set.

    Rows beyond `limit` bytes are written as Arrow record batches to a temporary file (in `TMPDIR`), which the data set
    maps into memory. The file is unlinked by `finish`, so that its space is freed with the data set.
    """

    def __init__(self, limit: int = IN_MEMORY_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        self._tables: list[pa.Table] = []
        self._files: list[IO[bytes]] = []
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._schema: pa.Schema | None = None

    def add(self, table: pa.Table) -> None:
        """Append the rows of a table.

        Raises:
            InputError: the disk is too small.
            pyarrow.ArrowException: a column has values of different types.
        """
        self._tables.append(table)
        self._bytes += table.nbytes
        if self._bytes > self._limit:
            self._write(_joined(self._tables))
            self._tables, self._bytes = [], 0

    def finish(self) -> Dataset:
        """All rows, with the columns of all tables; a column that a table lacks is null in its rows.

        Raises:
            pyarrow.ArrowException: a column has values of different types.
            ValueError, TypeError: a data set cannot have a column of this name or type.
        """
        self.close()
        mapped = [pa.ipc.open_stream(pa.memory_map(file.name)).read_all() for file in self._files]
        for file in self._files:
            file.close()  # which unlinks it; the mapping stays
        # The fingerprint of the content, which is the default, would take it into memory.
        return Dataset(_joined([*mapped, *self._tables]), fingerprint=generate_random_fingerprint())

    def close(self) -> None:
        """Close the writer of the file."""
        if self._writer is not None:
            self._writer.close()
            self._files[-1].flush()
            self._writer = None

    def _write(self, table: pa.Table) -> None:
        """Append a table to the file, or to a new one if the columns differ."""
        folder = Path(tempfile.gettempdir())
        free = shutil.disk_usage(folder).free
        if free < table.nbytes:
            text = (
                f"{folder}: {free / 2**20:.0f} MiB are free, but rows that do not fit in memory need more; free some"
                " space, or name a folder on a larger disk (environment variable TMPDIR)"
            )
            raise InputError(text, code=ErrorCode.DISK_FULL, path=folder)
        if self._schema != table.schema:
            self.close()
        if self._writer is None:
            file = tempfile.NamedTemporaryFile(suffix=".arrow")  # noqa: SIM115 - open until all rows are there
            self._files.append(file)
            self._writer = pa.ipc.new_stream(file, table.schema)
            self._schema = table.schema
        self._writer.write_table(table)


def _joined(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})


@dataclass(frozen=True)
class RowOrigin:
    """The files of rows, and how the rows were selected from them.

    Attributes:
        files: the files in order, each with its number of rows; empty for rows of a data set.
        selections: functions that return the indices selected among the rows of the previous selection; they are called
            only when a row is located.
    """

    files: Sequence[tuple[Path, int]] = ()
    selections: tuple[Callable[[], np.ndarray], ...] = ()

    def select(self, indices: Callable[[], np.ndarray]) -> RowOrigin:
        """The origin of the rows with these indices."""
        return replace(self, selections=(*self.selections, indices))

    def locate(self, indices: np.ndarray) -> tuple[Sequence[Path | None], np.ndarray]:
        """The files of rows with some indices, None for a data set, and their numbers there, counted from 1."""
        for selection in reversed(self.selections):
            indices = selection()[indices]
        if not self.files:
            return [None] * len(indices), indices + 1
        paths, counts = zip(*self.files, strict=True)
        ends = np.cumsum(counts)
        numbers = np.searchsorted(ends, indices, side="right")
        return [paths[number] for number in numbers], indices - (ends - counts)[numbers] + 1

    @contextmanager
    def located(self) -> Iterator[None]:
        """Inside, an error of one of these rows names its file and its number there."""
        try:
            yield
        except RowError as error:
            (file,), (row,) = self.locate(np.array([error.details["row"] - 1]))
            raise error.at(file, int(row)) from error


class SplitRows(dict[str, Dataset]):
    """Rows by the name of their split.

    Attributes:
        origins: the origin of the rows of each split; rows of a data set have none.
    """

    def __init__(self, rows: Mapping[str, Dataset], origins: Mapping[str, RowOrigin] | None = None) -> None:
        super().__init__(rows)
        self.origins = dict.fromkeys(rows, RowOrigin()) | dict(origins or {})
