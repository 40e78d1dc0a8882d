"""The separator and quotes of a table, and whether its first line names columns, by its first rows."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

_SEPARATORS = {".csv": (",", ";", "\t", "|"), ".tsv": ("\t", ",", ";", "|")}
"""Suffix of a table -> separators that it may have, the usual one first."""
_MOST = 0.5  # minimum share of the rows with equally many cells, so that the rest count as faulty
_QUOTED = re.compile(r'"(?:[^"]|"")*"', re.DOTALL)
_ROWS = 1000  # rows whose cells are compared with the names of their columns


@dataclass(frozen=True)
class Dialect:
    """How a table is written.

    Attributes:
        separator: the character between two cells.
        is_quoted: whether cells with separators, line ends or quotes are quoted.
    """

    separator: str
    is_quoted: bool


@dataclass(frozen=True)
class _Reading:
    """The rows of a sample, read in a dialect; with malformed quotes, the lines of its text."""

    dialect: Dialect
    rows: list[list[str]]
    is_malformed: bool = False

    @property
    def share(self) -> float:
        """Share of the rows with the most frequent number of cells; zero if that or the first row is a single cell."""
        ((width, count),) = Counter(map(len, self.rows)).most_common(1) or [(0, 0)]
        return count / len(self.rows) if width > 1 and len(self.rows[0]) > 1 else 0.0

    @property
    def rank(self) -> tuple[bool, float]:
        """What decides between separators: whether no row is faulty, then the share of the rows that are not."""
        return not self.is_malformed and self.share == 1, self.share


def find_dialect(sample: str, suffix: str, *, is_whole: bool) -> Dialect:
    """The dialect of a table: the one in which the largest share of the rows has equally many cells, at least two.

    Malformed quotes count as a faulty row. Between equal shares, the usual separator of the suffix decides, then the
    number of columns. If fewer than half of the rows have equally many cells, the separator is the usual one.

    Cells between tabs are not quoted, unless quotes around cells show that a program wrote them.

    Args:
        sample: the first rows of the file.
        suffix: `.csv` or `.tsv`.
        is_whole: whether the sample is the whole file; otherwise its last row may be cut, and is ignored.
    """
    usual, *further = (_read(sample, separator, is_whole=is_whole) for separator in _SEPARATORS[suffix])
    further.sort(key=lambda reading: -len(reading.rows[0]) if reading.rows else 0)
    best = max([usual, *further], key=lambda reading: reading.rank)
    return (best if best.share >= _MOST else usual).dialect


def _read(sample: str, separator: str, *, is_whole: bool) -> _Reading:
    quoted = _rows(sample, separator, is_quoted=True, is_whole=is_whole)
    plain = _rows(sample, separator, is_quoted=False, is_whole=is_whole) or []
    if separator != "\t":
        return _Reading(Dialect(separator, True), plain if quoted is None else quoted, is_malformed=quoted is None)
    with_quotes, without = _Reading(Dialect(separator, True), quoted or []), _Reading(Dialect(separator, False), plain)
    is_needed = without.share < 1 or _is_escaped(plain)
    return with_quotes if is_needed and with_quotes.share == 1 else without


def _rows(sample: str, separator: str, *, is_quoted: bool, is_whole: bool) -> list[list[str]] | None:
    """The rows without blank lines; None if quotes are malformed."""
    quoting: Any = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    reader = csv.reader(io.StringIO(sample, newline=""), delimiter=separator, quoting=quoting, strict=True)
    rows: list[list[str]] = []
    try:
        rows.extend(row for row in reader if row)
    except csv.Error as error:
        return None if is_whole or "unexpected end" not in str(error) else rows
    return rows if is_whole else rows[:-1]


def _is_escaped(rows: Iterable[list[str]]) -> bool:
    """Whether a program quoted cells: names of columns, or cells whose quotes are doubled."""
    cells = [(number == 0, cell) for number, row in enumerate(rows) for cell in row if '"' in cell]
    if not all(_QUOTED.fullmatch(cell) for _, cell in cells):
        return False
    return any(is_name or '""' in cell[1:-1] for is_name, cell in cells)


def header_evidence(table: pa.Table) -> str | None:
    """Why the names of a table's columns are cells of a row, in a few words; None if they may be names.

    A name is a cell if its column contains it, or if it is a number, unless columns are numbered from 0 or 1.
    """
    names = [str(name) for name in table.column_names]
    if any(names == [str(first + number) for number in range(len(names))] for first in (0, 1)):
        return None
    for name in names:
        if name in table.column(name)[:_ROWS].to_pylist():
            return f"{name!r:.40} is also a value of its column"
    for name in names:
        with contextlib.suppress(ValueError):
            if math.isfinite(float(name.replace(",", "."))):
                return f"{name!r} is a number"
    return None


def proposed_names(table: pa.Table) -> list[str]:
    """Names for the columns of a table without names: `text` for the most words, `label` for the fewest values."""
    columns = {name: [name, *table.column(name)[:_ROWS].to_pylist()] for name in table.column_names}
    longest = max(columns, key=lambda name: sum(len(cell.split()) for cell in columns[name]))
    remaining = [name for name in columns if name != longest]
    label = min(remaining, key=lambda name: len(set(columns[name])), default=None)
    usual = {longest: "text", label: "label"}
    return [usual.get(name, f"column {number}") for number, name in enumerate(table.column_names, 1)]
