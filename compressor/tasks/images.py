"""Read images of rows, from folders of image files, and from columns of images or of paths."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor

from compressor.errors import ErrorCode, InputError, RowError
from compressor.model_folder import load_processor, require_processor
from compressor.model_folder.processor import pixels_of
from compressor.results import Note, NoteCode
from compressor.silence_libraries import one_line, quiet_transformers
from compressor.tasks.columns import check_present, is_text, list_columns
from compressor.tasks.labels import listed_names
from compressor.tasks.row_files import has_tables
from compressor.tasks.row_origin import SplitRows
from compressor.tasks.splits import is_saved, named_splits, pick, pick_any

Result = TypeVar("Result")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
IMAGE, LABEL = "image", "label"
"""Columns of the rows of a folder of images."""
_USUAL_COLUMNS = (IMAGE, "images", "img", "picture", "image_path", "file_name", "filename", "path", "file")
_CHUNK_ROWS = 256
"""Number of rows whose images are in memory at once."""
_SOURCE_COLUMNS = (
    ("content", pa.large_binary()),
    ("path", pa.string()),
    ("source", pa.string()),
    ("row", pa.int64()),
    ("column", pa.string()),
    ("file", pa.string()),
    ("digest", pa.string()),
)


def image_column(rows: Dataset, requested: str | None, source: str) -> str:
    """The name of the column of images, or of paths of image files.

    Args:
        rows: the rows.
        requested: name from the recipe; None: the first usual name.
        source: name of the rows in error messages.

    Raises:
        InputError: the named column is missing, no usual name is present, or the column holds something else.
    """
    if requested is not None:
        check_present(rows, requested, source, "image_column")
    name = requested or next((name for name in _USUAL_COLUMNS if name in rows.column_names), None)
    if name is None:
        raise InputError(
            f"{source}: no column of images among {list_columns(rows)}; name it (--image-column)",
            code=ErrorCode.COLUMN_MISSING,
            field="image_column",
            columns=tuple(rows.column_names),
        )
    if not is_text(rows, name) and not _holds_images(rows, name):
        raise InputError(
            f"{source}: column {name!r} holds neither images nor paths; name one that does (--image-column)",
            code=ErrorCode.INVALID_ROWS,
            column=name,
        )
    return name


def image_splits(source: str, requested: str | None) -> SplitRows:
    """The rows of a folder of images, of files of rows, or of a data set, by the name of their split.

    The subfolders of a folder of images are its classes, or its splits, by their names. Columns are `image`, the path
    of a file, and `label`; a folder without subfolders has no labels. Paths in files of rows are relative to the folder
    of the file.

    Args:
        source: path of a folder or file, or the name of a data set.
        requested: the column of images in files of rows, from the recipe; None: the usual names.

    Raises:
        InputError: the rows cannot be read, or an image is not in the folder of a class.
    """
    path = Path(source)
    if _is_image_folder(path):
        if next(_image_files(path), None) is None:
            text = f"{path}: has neither images ({', '.join(SUFFIXES)}) nor files of rows; name the folder of either"
            raise InputError(text, code=ErrorCode.FILE_MISSING, path=path)
        return SplitRows(
            {split: _folder_rows(folder) for split, folder in (_split_folders(path) or {"": path}).items()}
        )
    splits = named_splits(source)
    if not path.exists():
        return splits
    folder = path if path.is_dir() else path.parent
    return SplitRows(
        {split: _with_paths(rows, image_column(rows, requested, source), folder) for split, rows in splits.items()},
        splits.origins,
    )


def skipped_files(source: str) -> tuple[Note, ...]:
    """A note on the suffixes of files in a folder of images that are not read, if there are any."""
    path = Path(source)
    if not _is_image_folder(path):
        return ()
    files = [file for file in path.rglob("*") if file.is_file() and not _is_image(file)]
    visible = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    suffixes = Counter(file.suffix or file.name for file in visible)
    listed = listed_names([f"{count} {suffix}" for suffix, count in suffixes.most_common()])
    text = f"{source}: files that are not read: {listed}; images end in {', '.join(SUFFIXES)}"
    return (Note(text=text, code=NoteCode.FILES_SKIPPED),) if suffixes else ()


def _is_image_folder(path: Path) -> bool:
    """Whether a source is a folder of image files, rather than of files of rows with a folder of images."""
    return path.is_dir() and not is_saved(path) and (not has_tables(path) or len(_class_folders(path)) > 1)


def _split_folders(folder: Path) -> dict[str, Path]:
    """The subfolders by name, if all are named after splits and hold images; else empty."""
    subfolders = _subfolders(folder)
    are_splits = all(any(pick([path.name], split) for split in ("train", "eval", "test")) for path in subfolders)
    return {path.name: path for path in subfolders} if are_splits and _class_folders(folder) == subfolders else {}


def _folder_rows(folder: Path) -> Dataset:
    """A row for each image of a folder."""
    classes = _class_folders(folder)
    images = sorted(path for path in folder.iterdir() if _is_image(path))
    if classes and images:
        text = f"{images[0]}: is outside of the folders of classes ({classes[0].name}, ...); move it into one of them"
        raise InputError(text, code=ErrorCode.INVALID_ROWS, path=images[0])
    if not classes:
        return Dataset(pa.table({IMAGE: pa.array(map(str, images), pa.string())}))
    files = [(str(path), subfolder.name) for subfolder in classes for path in sorted(_image_files(subfolder))]
    paths, labels = zip(*files, strict=True)
    return Dataset(pa.table({IMAGE: pa.array(paths, pa.string()), LABEL: pa.array(labels, pa.string())}))


def _class_folders(folder: Path) -> list[Path]:
    """The subfolders that hold images, at any depth."""
    return [path for path in _subfolders(folder) if next(_image_files(path), None) is not None]


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _image_files(folder: Path) -> Iterator[Path]:
    """The images of a folder and of its subfolders, in any order."""
    return (path for path in folder.rglob("*") if _is_image(path))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _with_paths(rows: Dataset, column: str, folder: Path) -> Dataset:
    """Rows whose paths are relative to the current folder instead of `folder`; rows with images are not changed."""
    if not is_text(rows, column):
        return rows
    table: pa.Table = rows.with_format("arrow")[:]
    paths = [str(folder / path) if path else "" for path in table.column(column).to_pylist()]
    return Dataset(table.set_column(table.column_names.index(column), column, pa.array(paths, pa.string())))


def _holds_images(rows: Dataset, name: str) -> bool:
    """Whether a column holds the bytes of files, with or without paths, as `datasets.Image` stores them."""
    stored = rows.features.arrow_schema.field(name).type
    if pa.types.is_struct(stored):
        return {"bytes", "path"} <= {stored.field(index).name for index in range(stored.num_fields)}
    return bool(pa.types.is_binary(stored) or pa.types.is_large_binary(stored))


@dataclass(frozen=True)
class ImageSource:
    """An image of a row: its bytes, or its file.

    Attributes:
        content: the bytes of the image file; None: `path` is read.
        path: path of the image file; may be empty if there is content.
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
        """The bytes of the image file; raise InputError if it cannot be read."""
        if self.content is not None:
            return self.content
        try:
            return Path(self.path).read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise self.unusable(f"cannot be read ({reason})") from error

    def digest(self, settings: str) -> str:
        """The hash of an image that can be opened, and of the settings of its processor.

        Raises:
            InputError: the file cannot be read, or is not an image.
        """
        import PIL.Image

        def open_and_hash(content: bytes) -> str:
            PIL.Image.open(io.BytesIO(content)).close()
            return hashlib.sha256(content + settings.encode()).hexdigest()

        return self._use("is not a readable image", open_and_hash)

    def decode(self) -> None:
        """Raise InputError unless the image can be decoded."""
        import PIL.Image

        def load(content: bytes) -> None:
            with PIL.Image.open(io.BytesIO(content)) as image:
                image.load()

        self._use("cannot be decoded", load)

    def pixels(self, processor: Any) -> Tensor:
        """The pixels `[channel, height, width]` that an image processor returns.

        Raises:
            InputError: the file cannot be read or decoded, or the processor refuses the image.
        """
        return self._use("cannot be decoded or processed", lambda content: pixels_of(content, processor))

    def unusable(self, reason: str) -> RowError:
        """The error for this image, with its row, column and file."""
        file = f" ({self.path})" if self.path else ""
        problem = f"{self.column!r}{file}: {reason}; replace the image or remove its row"
        return RowError.of(self.source, self.row, problem, column=self.column, path=self.path)

    def _use(self, problem: str, use: Callable[[bytes], Result]) -> Result:
        """The result of a function of the bytes; errors, which have any type for damaged images, name the row."""
        content = self.read()
        try:
            return use(content)
        except Exception as error:
            # Pillow's message names an object in memory.
            raise self.unusable(f"{problem} ({one_line(error).partition(' <_io')[0]})") from error


def image_sources(rows: Dataset, column: str, source: str) -> Iterator[ImageSource]:
    """The images of rows; few are in memory at once.

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
            if isinstance(value, dict):
                content, path = value["bytes"], value["path"]
            else:
                content, path = (value, "") if isinstance(value, bytes) else (None, value)
            image = ImageSource(content or None, path or "", source, number, column)
            if not content and not path:
                raise image.unusable("is empty")
            yield image


def source_table(sources: Sequence[ImageSource], settings: str) -> pa.Table:
    """Columns of examples: the fields of `ImageSource`, the file that reports show, and `ImageSource.digest`."""
    columns = {name: [getattr(source, name) for source in sources] for name, _ in _SOURCE_COLUMNS[:5]}
    columns["file"] = ["/".join(Path(source.path).parts[-2:]) for source in sources]
    columns["digest"] = [source.digest(settings) for source in sources]
    return pa.table(columns, pa.schema(_SOURCE_COLUMNS))


def read_pixels(source: str, folder: Path, maximum: int, *, requested: str | None = None) -> np.ndarray:
    """The first images of a source, `[images, channel, height, width]`.

    The rows are those of the test split, else of the evaluation split, else of the first split.

    Args:
        source: a folder of images, a file of rows, or the name of a data set.
        folder: the folder of a model with an image processor.
        maximum: maximum number of images.
        requested: the column of images in files of rows; None: the usual names.

    Raises:
        InputError: the folder has no image processor, or the source or an image cannot be read.
        TargetMissingError: a library that the image processor needs is not installed.
    """
    with quiet_transformers():
        processor = load_processor(folder, images=True)
    require_processor(processor, folder, images=True)
    splits = image_splits(source, requested)
    split = pick_any(splits, "test", "eval")
    images = image_sources(splits[split], image_column(splits[split], requested, source), source)
    with splits.origins[split].located():
        return torch.stack([image.pixels(processor) for image in itertools.islice(images, maximum)]).numpy()
