"""The content of a file as UTF-8 text, checked while it is read."""

from __future__ import annotations

import codecs
import io
import re
from pathlib import Path
from typing import BinaryIO

from compressor.errors import ErrorCode, InputError

_CHUNK_BYTES = 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_QUOTES = re.compile(rb'"+')
_CELL_ENDS = (b"\n", b"\r", b",")


class TextFile(io.RawIOBase):
    """A binary file without its byte order mark; reading raises an error at the first bytes that are not text.

    Args:
        path: the file, as error messages name it.
        file: its content, decompressed.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__()
        self._path, self._file = path, file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._lines = 0
        self._ahead = file.read(_CHUNK_BYTES).removeprefix(_BYTE_ORDER_MARK)
        self._check(self._ahead)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, at most `size`; empty at the end.

        Raises:
            InputError: they are not UTF-8, or hold a zero byte; the message names the line.
        """
        if self._ahead:
            size = len(self._ahead) if size < 0 else size
            chunk, self._ahead = self._ahead[:size], self._ahead[size:]
            return chunk
        chunk = self._file.read(size)
        self._check(chunk)
        return chunk

    def is_blank(self) -> bool:
        """Whether all that was not read yet is white space."""
        while not self._ahead.strip():
            chunk = self._file.read(_CHUNK_BYTES)
            self._check(chunk)
            if not chunk:
                return True
            self._ahead += chunk
        return False

    def _check(self, chunk: bytes) -> None:
        try:
            self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line = self._lines + error.object.count(b"\n", 0, error.start) + 1
            raise InputError(
                f"{self._path}: line {line} is not UTF-8; save the file as UTF-8",
                code=ErrorCode.FILE_UNREADABLE,
                path=self._path,
                line=line,
            ) from error
        if (zero := chunk.find(b"\x00")) >= 0:
            line = self._lines + chunk.count(b"\n", 0, zero) + 1
            raise InputError(
                f"{self._path}: line {line} holds a zero byte and is not text; save the file as UTF-8",
                code=ErrorCode.FILE_UNREADABLE,
                path=self._path,
                line=line,
            )
        self._lines += chunk.count(b"\n")


class QuotedTextFile(TextFile):
    """A file of CSV, which knows whether what was read of it ends inside quotes.

    A quote opens a cell at its beginning alone; two quotes inside of one are a quote of its text.

    Args:
        path: the file, as error messages name it.
        file: its content, decompressed.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._open_line: int | None = None
        self._line, self._last, self._held = 1, b"\n", b""
        super().__init__(path, file)

    def read(self, size: int = -1) -> bytes:
        """The next bytes; see `TextFile.read`."""
        chunk = super().read(size)
        self._follow_quotes(chunk)
        return chunk

    @property
    def open_line(self) -> int | None:
        """Number of the line with the quote that was opened and is not closed at the end; None: there is none."""
        self._follow_quotes(b"")
        return self._open_line

    def _follow_quotes(self, chunk: bytes) -> None:
        """Follow the quotes of a chunk; empty: of the end of the file."""
        text = self._held + chunk
        end = len(text.rstrip(b'"')) if chunk else len(text)  # quotes that go on in the next chunk are one run
        text, self._held = text[:end], text[end:]
        counted = 0
        for quotes in _QUOTES.finditer(text):
            begin, is_odd = quotes.start(), len(quotes.group()) % 2
            self._line += text.count(b"\n", counted, begin)
            counted = begin
            before = text[begin - 1 : begin] if begin else self._last
            if self._open_line is not None:
                self._open_line = None if is_odd else self._open_line
            elif is_odd and before in _CELL_ENDS:
                self._open_line = self._line
        self._line += text.count(b"\n", counted)
        self._last = text[-1:] or self._last
