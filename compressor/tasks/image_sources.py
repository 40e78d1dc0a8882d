"""The images of rows: where the bytes of each are, and errors that name its row."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from datasets.fingerprint import generate_random_fingerprint
from torch import Tensor

from compressor.errors import RowError
from compressor.model_folder.image_processor import pixels_of
from compressor.silence_libraries import one_line
from compressor.tasks.row_origin import RowOrigin

_CHUNK_ROWS = 256
"""Rows whose images are in memory at once."""


@dataclass(frozen=True)
class ImageSource:
    """Where the bytes of an image are.

    Attributes:
        content: the bytes of its file; None: they are in the file `path`.
        path: path of the file; empty for an image without a name.
        source: name of the rows in error messages.
        row: number of the row, counted from 1.
        column: the column that holds the image.
    """

    content: bytes | None
    path: str
    source: str
    row: int
    column: str

    def read(self) -> bytes:
        """The bytes of the image file.

        Raises:
            InputError: the file cannot be read.
        """
        if self.content is not None:
            return self.content
        try:
            return Path(self.path).read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise self.unusable(f"cannot be read ({reason})") from error

    def decode(self) -> None:
        """Decode the image, which is not kept.

        Raises:
            InputError: the file cannot be read or decoded.
        """
        import PIL.Image

        content = self.read()
        try:
            with PIL.Image.open(io.BytesIO(content)) as image:
                image.load()
        except Exception as error:  # damaged images raise errors of any type
            raise self.unusable(f"cannot be decoded ({reason_of(error)})") from error

    def pixels(self, processor: Any) -> Tensor:
        """The pixels `[channel, height, width]` that an image processor makes.

        Raises:
            InputError: the file cannot be read or decoded, or the processor refuses the image.
        """
        content = self.read()
        try:
            return pixels_of(content, processor)
        except Exception as error:  # damaged images raise errors of any type
            raise self.unusable(f"cannot be decoded or processed ({reason_of(error)})") from error

    def unusable(self, reason: str) -> RowError:
        """The error for this image, with its row, column and file."""
        file = f" ({self.path})" if self.path else ""
        problem = f"{self.column!r}{file}: {reason}; replace the image or remove its row"
        return RowError.of(self.source, self.row, problem, column=self.column, path=self.path)

    @property
    def label(self) -> str:
        """The end of the path: the name of the file after that of its folder."""
        return "/".join(Path(self.path).parts[-2:])


def reason_of(error: Exception) -> str:
    """The message of an error of Pillow, without the object in memory that it names."""
    return one_line(error).partition(" <_io")[0]


def image_sources(rows: Dataset, column: str, source: str) -> Iterator[ImageSource]:
    """The images of rows, one after another; few are in memory at once.

    Args:
        rows: the rows.
        column: the column of images or of paths.
        source: name of the rows in error messages.

    Raises:
        InputError: a row has no image.
    """
    number = 0
    for chunk in rows.select_columns(column).with_format("arrow").iter(batch_size=_CHUNK_ROWS):
        for value in chunk.column(0).to_pylist():
            number += 1
            content, path = _content_and_path(value)
            image = ImageSource(content or None, path, source, number, column)
            if not content and not path:
                raise image.unusable("is empty")
            yield image


def digest(content: bytes) -> str:
    """A hash of the bytes of an image."""
    return hashlib.sha256(content).hexdigest()


def source_columns(sources: Sequence[ImageSource], digests: Sequence[str]) -> dict[str, pa.Array]:
    """Columns of encoded rows, from which `ImageSource` is restored, and the hashes of the images."""
    return {
        "content": pa.array([source.content for source in sources], pa.large_binary()),
        "path": pa.array([source.path for source in sources], pa.string()),
        "source": pa.array([source.source for source in sources], pa.string()),
        "row": pa.array([source.row for source in sources], pa.int64()),
        "column": pa.array([source.column for source in sources], pa.string()),
        "file": pa.array([source.label for source in sources], pa.string()),
        "digest": pa.array(digests, pa.string()),
    }


def located_rows(encoded: Dataset, origin: RowOrigin) -> Dataset:
    """Encoded rows whose `source` and `row` are the file of each row, where it has one, and its number there.

    Args:
        encoded: rows with the columns of `source_columns`, in their order.
        origin: where these rows come from.
    """
    table: pa.Table = encoded.data.table
    files, numbers = origin.locate(np.arange(len(encoded)))
    sources = [source if file is None else str(file) for file, source in zip(files, encoded["source"], strict=True)]
    for name, values in (("source", pa.array(sources, pa.string())), ("row", pa.array(numbers, pa.int64()))):
        table = table.set_column(table.column_names.index(name), name, values)
    return Dataset(table, fingerprint=generate_random_fingerprint())


def _content_and_path(value: Any) -> tuple[bytes | None, str]:
    """The bytes and the path of a cell, where it has them."""
    if isinstance(value, dict):
        return value["bytes"], value["path"] or ""
    return (value, "") if isinstance(value, bytes) else (None, value or "")
