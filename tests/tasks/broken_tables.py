"""Tables as spreadsheets, scripts and editors write them, each with its rows or the code of its error."""

from __future__ import annotations

import csv
import gzip
import io
from dataclasses import dataclass
from typing import Any

from compressor.errors import ErrorCode

WORDS = "good bad film plot very not at all".split()
ROWS = tuple((f"a {WORDS[n % 2]} {WORDS[n % 7]}, {WORDS[(3 * n) % 8]}; gr\u00fcn {n}", str(n % 2)) for n in range(24))
"""Texts with commas, semicolons and a letter beyond ASCII, and their labels."""
QUOTES = tuple((text.replace("a ", 'a "fine"\n', 1), label) for text, label in ROWS)
"""The same with quotes and line ends."""


@dataclass(frozen=True)
class Table:
    """A file of rows.

    Attributes:
        name: its file name.
        content: its bytes.
        rows: text and label of each row; None: it cannot be read.
        code: the code of its error; None: it can be read.
        columns: requested columns of text and label.
    """

    name: str
    content: bytes
    rows: tuple[tuple[str, str], ...] | None = ROWS
    code: ErrorCode | None = None
    columns: tuple[str, str] | None = None


def written(
    separator: str,
    rows: tuple[tuple[str, ...], ...] = ROWS,
    *,
    header: tuple[str, ...] | None = ("text", "label"),
    quoting: Any = csv.QUOTE_MINIMAL,
    end: str = "\n",
) -> str:
    """Rows as the standard library writes them."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, quoting=quoting, lineterminator=end)
    writer.writerows(rows if header is None else (header, *rows))
    return text.getvalue()


def plain(separator: str, rows: tuple[tuple[str, ...], ...] = ROWS, header: str | None = None) -> str:
    """Rows without quotes."""
    lines = [separator.join(("text", "label")) if header is None else header, *(separator.join(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _unreadable(name: str, content: str | bytes) -> Table:
    raw = content if isinstance(content, bytes) else content.encode()
    return Table(name, raw, None, ErrorCode.FILE_UNREADABLE)


PLAIN = tuple((text.replace(",", "").replace(";", ""), label) for text, label in ROWS)
"""The rows without separators."""
LATIN = written(",").encode("latin-1")
LINES = plain(",", PLAIN).splitlines(keepends=True)
DECIMALS = tuple((text, f"{n},{n % 9}5") for n, (text, _) in enumerate(ROWS))

TABLES: dict[str, Table] = {
    "semicolons": Table("a.csv", written(";").encode()),
    "bars": Table("a.csv", written("|").encode()),
    "tabs in .csv": Table("a.csv", plain("\t").encode()),
    "commas in .tsv": Table("a.tsv", written(",").encode()),
    "semicolons in .tsv": Table("a.tsv", written(";").encode()),
    "every cell quoted": Table("a.csv", written(";", quoting=csv.QUOTE_ALL, end="\r\n").encode()),
    "every cell quoted, tabs": Table("a.tsv", written("\t", quoting=csv.QUOTE_ALL).encode()),
    "quotes and line ends in cells": Table("a.csv", written(";", QUOTES, end="\r\n").encode(), QUOTES),
    "quotes and line ends in cells, tabs": Table("a.tsv", written("\t", QUOTES).encode(), QUOTES),
    "a line that names the separator": Table("a.csv", ("sep=;\r\n" + written(";", end="\r\n")).encode()),
    "old line ends": Table("a.csv", written(",", end="\r").encode()),
    "UTF-8 with a mark": Table("a.csv", written(";").encode("utf-8-sig")),
    "UTF-16 with a mark": Table("a.csv", written("\t").encode("utf-16")),
    "UTF-16 without a mark": Table("a.csv", written(";").encode("utf-16-le")),
    "big-endian UTF-16": Table("a.tsv", written("\t", end="\r\n").encode("utf-16-be")),
    "UTF-16, compressed": Table("a.csv.gz", gzip.compress(written(",").encode("utf-16"))),
    "names in capitals": Table("a.csv", written(";", header=("Text", "Label")).encode(), columns=("Text", "Label")),
    "a column without a name": Table(
        "a.csv",
        written(",", tuple((str(n), *row) for n, row in enumerate(ROWS)), header=("", "text", "label")).encode(),
    ),
    "separators at every end": Table(
        "a.csv", plain(",", tuple((*row, "", "") for row in PLAIN), "text,label,,").encode(), PLAIN
    ),
    "Latin-1": _unreadable("a.csv", LATIN),
    "Latin-1, compressed": _unreadable("a.csv.gz", gzip.compress(LATIN)),
    "Windows-1252": _unreadable("a.tsv", plain("\t").replace("fine", "\u201cfine\u201d").encode("cp1252")),
    "one line of Latin-1": _unreadable("a.csv", written(",").encode() + "gr\u00fcn,1\n".encode("latin-1")),
    "a character cut off": _unreadable("a.csv", written(",").encode() + "gr\u00fc".encode()[:-1]),
    "Shift JIS": _unreadable("a.csv", "text,label\n映画は面白い,1\n映画,0\n".encode("shift-jis")),
    "a cell too many": _unreadable("a.csv", "".join([*LINES, "a,b,0\n"])),
    "a cell too few, semicolons": _unreadable("a.csv", plain(";", PLAIN) + "a\n"),
    "separators behind rows alone": _unreadable("a.csv", plain(",", tuple((*row, "") for row in PLAIN), "text,label")),
    "a header without the index": _unreadable("a.csv", plain(",", tuple(("1", *row) for row in PLAIN), "text,label")),
    "text behind quotes": _unreadable("a.csv", 'text,label\n"Great" film,1\nbad,0\n'),
    "a quote that is open": _unreadable("a.csv", 'text;label\ngood;1\n"bad;0\nfilm;1\n'),
    "equal names": _unreadable("a.csv", "text;text\na;1\nb;0\n"),
    "a web page": _unreadable("a.csv", "<!DOCTYPE html>\n<p>text,label</p>\n"),
    "JSON": _unreadable("a.csv", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n'),
    "gzip without a suffix": _unreadable("a.csv", gzip.compress(written(",").encode())),
    "a spreadsheet": _unreadable("a.csv", b"PK\x03\x04\x14\x00\x06\x00\x08\x00"),
    "a pointer": _unreadable("a.tsv", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "no line of names": Table("a.csv", written(";", header=None).encode(), None, ErrorCode.COLUMN_MISSING),
    "no line of names, tabs": Table(
        "a.tsv",
        plain("\t", tuple((label, text) for text, label in ROWS[1:]), "\t".join(ROWS[0][::-1])).encode(),
        None,
        ErrorCode.COLUMN_MISSING,
    ),
    "no line of names, named": Table(
        "a.csv", written(",", PLAIN, header=None).encode(), None, ErrorCode.COLUMN_MISSING, PLAIN[0]
    ),
    "nothing": Table("a.csv", b"", None, ErrorCode.TOO_FEW_ROWS),
    "names alone": Table("a.csv", b"text;label\r\n", None, ErrorCode.TOO_FEW_ROWS),
}
