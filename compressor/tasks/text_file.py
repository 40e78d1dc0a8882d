"""The content of a file as UTF-8 text, checked while it is read."""

from __future__ import annotations

import codecs
import io
import re
import shlex
from pathlib import Path
from typing import BinaryIO

from compressor.config.values import PACKED
from compressor.errors import ErrorCode, InputError

_CHUNK_BYTES = 2**20
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
"""First bytes of files that are no text -> what they are, and what to do."""
_UNPACKERS = dict(zip(PACKED, ("xz -dc", "gzip -dc"), strict=True))
_QUOTES = re.compile(rb'"+')
_SINGLE = re.compile(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])")
_RUNS, _HIGH = re.compile(rb"[\x80-\xff]+"), re.compile(rb"[\x80-\xff]")
_LATIN = re.compile(rb"[\x80\x85\x91-\x97\x99\xa0-\xff]")
_LEAST_KNOWN = 0.9
"""Share of the bytes beyond ASCII that are letters, quotes, dashes or the like in a text of Latin-1 or Windows-1252."""
_CONTROL = re.compile(rb"[\x80-\x9f]")


class FormatError(ValueError):
    """A file is not of the form that its name tells; the message says what it is, and what to do."""


class LineError(ValueError):
    """A line of a file is malformed.

    Args:
        line: number of the line, counted from 1.
        reason: what is wrong with it.
        column: name of the column of the value that is wrong, where it is one.
    """

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

    Raises:
        InputError: the file is none of text.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__()
        self._path, self._file, self._lines = path, file, 0
        self._quotes: Quotes | None = None
        head = file.read(_CHUNK_BYTES)
        if (problem := next((_SIGNATURES[first] for first in _SIGNATURES if head.startswith(first)), None)) is not None:
            raise self._error(problem)
        mark = next((mark for mark in _MARKS if head.startswith(mark)), b"")
        self.encoding, self.has_mark = _MARKS[mark] if mark else _unmarked_encoding(head), bool(mark)
        self._decoder = codecs.getincrementaldecoder(self.encoding)()
        self._ahead = self._decode(head.removeprefix(mark))

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, at most `size`; empty at the end.

        Raises:
            InputError: they are not text of the encoding, or hold a zero byte; the message names the line.
            LineError: text follows the quote that closes a cell; see `follow_quotes`.
        """
        # Arrow takes a short read for a block, which has to hold the end of a row.
        while (missing := size - len(self._ahead)) > 0 and (fetched := self._fetch(missing)):
            self._ahead += fetched
        if size < 0 and not self._ahead:
            self._ahead = self._fetch(size)
        chunk = self._ahead if size < 0 else self._ahead[:size]
        self._ahead = self._ahead[len(chunk) :]
        if self._quotes is not None:
            self._quotes.follow(chunk)
        return chunk

    def head(self) -> bytes:
        """The next bytes, which are read again afterwards; at most 1 MiB of the file."""
        return self._ahead

    def is_blank(self) -> bool:
        """Whether all that was not read yet is white space."""
        while not self._ahead.strip():
            chunk = self._fetch(_CHUNK_BYTES)
            if not chunk:
                return True
            self._ahead += chunk
        return False

    def skip_line(self) -> None:
        """Pass over the first line."""
        self._ahead = self._ahead.partition(b"\n")[2]

    def follow_quotes(self, separator: str) -> None:
        """Check the quotes of all that is read from now on."""
        self._quotes = Quotes(separator.encode(), self._lines - self._ahead.count(b"\n") + 1)

    @property
    def open_line(self) -> int | None:
        """Number of the line with the quote that was opened and is not closed at the end; None: there is none."""
        return None if self._quotes is None else self._quotes.open_line

    def _fetch(self, size: int) -> bytes:
        """The next bytes of the file as UTF-8; empty at its end alone."""
        while raw := self._file.read(size):
            if chunk := self._decode(raw):
                return chunk
        return self._decode(b"")

    def _decode(self, raw: bytes) -> bytes:
        """Bytes of the file as UTF-8, as far as they are whole characters."""
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
        """What the bytes of a file are that its encoding does not have, and what to do."""
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
        """The command that converts the file from an encoding."""
        path, suffix = self._path, self._path.suffix
        unpacked = path.with_suffix("") if suffix.lower() in PACKED else path
        out = shlex.quote(str(unpacked.with_name(f"{unpacked.stem}.utf8{unpacked.suffix}")))
        source = shlex.quote(str(path))
        if unpacked is path:
            return f"iconv -f {name} -t UTF-8 {source} > {out}"
        return f"{_UNPACKERS[suffix.lower()]} {source} | iconv -f {name} -t UTF-8 > {out}"

    def _error(self, problem: str, **details: int) -> InputError:
        return InputError(f"{self._path}: {problem}", code=ErrorCode.FILE_UNREADABLE, path=self._path, **details)


def _unmarked_encoding(head: bytes) -> str:
    """The encoding of a file without a mark, by where the zero bytes of its first two characters are."""
    zeros = tuple(byte == 0 for byte in head[:4])
    if len(head) % 2 == 0 and zeros in ((False, True, False, True), (True, False, True, False)):
        return "utf-16-le" if zeros[1] else "utf-16-be"
    return "utf-8"


class Quotes:
    """Follows the quotes of a table: whether what was read of it ends inside of some.

    A quote opens a cell at its beginning alone; two quotes inside of one are a quote of its text.

    Args:
        separator: the separator of cells.
        line: number of the first line that is followed.
    """

    def __init__(self, separator: bytes, line: int = 1) -> None:
        self._ends = (b"\n", b"\r", separator, b"")
        self._open: int | None = None
        self._line, self._last, self._held = line, b"\n", b""

    @property
    def open_line(self) -> int | None:
        """Number of the line with the quote that was opened and is not closed at the end; None: there is none."""
        self.follow(b"")
        return self._open

    def follow(self, chunk: bytes) -> None:
        """Follow the quotes of a chunk; empty: of the end of the file.

        Raises:
            LineError: text follows the quote that closes a cell.
        """
        text = self._held + chunk
        end = len(text.rstrip(b'"')) if chunk else len(text)  # quotes that go on in the next chunk are one run
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
                raise LineError(
                    self._line,
                    "text follows the quote that ends a cell; double the quotes inside of a cell and put quotes around"
                    " it, or remove them",
                )
        self._line += text.count(b"\n", counted)
        self._last = text[-1:] or self._last
