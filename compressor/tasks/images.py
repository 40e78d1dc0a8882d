"""Image classification, and the images of rows: from folders of image files, and from columns of images or of paths."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
from datasets import Dataset
from datasets.fingerprint import generate_random_fingerprint
from numpy.typing import DTypeLike

from compressor.answers import AnswerKind, answer_kind
from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, RowError, TargetMissingError, UsageError
from compressor.model_folder import ModelFolder
from compressor.model_folder.processor import (
    IMAGE_CLASSIFICATION,
    image_settings,
    load_processor,
    pixels_of,
    require_processor,
)
from compressor.results import Note, NoteCode
from compressor.silence_libraries import one_line
from compressor.tasks.base import Batch
from compressor.tasks.columns import check_present, is_text, list_columns
from compressor.tasks.labelled_rows import ClassLabels, LabelledRows, SeveralClasses
from compressor.tasks.labels import listed_names
from compressor.tasks.metrics import ACCURACY, Metric, column_mean, share
from compressor.tasks.row_files import has_tables
from compressor.tasks.row_store import RowOrigin, RowStore, SplitRows
from compressor.tasks.splits import is_saved, named_splits, pick, pick_any

Result = TypeVar("Result")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
IMAGE, LABEL = "image", "label"
"""Columns of the rows of a folder of images."""
_USUAL_COLUMNS = (IMAGE, "images", "img", "picture", "image_path", "file_name", "filename", "path", "file")
_CHUNK_ROWS = 256  # number of rows whose images are in memory at once
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
    """The name of the column of images, or of paths of image files: `requested`, or else the first usual name.

    Raises:
        InputError: the named column is missing, no usual name is present, or the column holds something else.
    """
    if requested is not None:
        check_present(rows, requested, source, "image_column")
    name = requested or next((name for name in _USUAL_COLUMNS if name in rows.column_names), None)
    if name is None:
        text = f"{source}: no column of images among {list_columns(rows)}; name it (--image-column)"
        details = {"field": "image_column", "columns": tuple(rows.column_names)}
        raise InputError(text, code=ErrorCode.COLUMN_MISSING, **details)
    # Images are the bytes of files, with or without paths, as `datasets.Image` stores them.
    stored = rows.features.arrow_schema.field(name).type
    is_file = pa.types.is_struct(stored) and {"bytes", "path"} <= {field.name for field in stored.fields}
    if not (is_file or is_text(rows, name) or pa.types.is_binary(stored) or pa.types.is_large_binary(stored)):
        text = f"{source}: column {name!r} holds neither images nor paths; name one that does (--image-column)"
        raise InputError(text, code=ErrorCode.INVALID_ROWS, column=name)
    return name


def image_splits(source: str, requested: str | None) -> SplitRows:
    """The rows of a folder of images, of files of rows, or of a data set, by the name of their split.

    The subfolders of a folder of images are its classes, or its splits, by their names. Columns are `image`, the path
    of a file, and `label`; a folder without subfolders has no labels. Paths in files of rows, in the column `requested`
    or one with a usual name, are relative to the folder of the file.

    Raises:
        InputError: the rows cannot be read, or an image is not in the folder of a class.
    """
    path = Path(source)
    if _is_image_folder(path):
        if next(_image_files(path), None) is None:
            text = f"{path}: has neither images ({', '.join(SUFFIXES)}) nor files of rows; name the folder of either"
            raise InputError(text, code=ErrorCode.FILE_MISSING, path=path)
        # The subfolders are splits if all are named after splits and hold images.
        folders = {folder.name: folder for folder in _subfolders(path)}
        are_splits = all(any(pick([name], split) for split in ("train", "eval", "test")) for name in folders)
        if not folders or not are_splits or _class_folders(path) != list(folders.values()):
            folders = {"": path}
        return SplitRows({split: _folder_rows(folder) for split, folder in folders.items()})
    splits = named_splits(source)
    if not path.exists():
        return splits
    folder = path if path.is_dir() else path.parent

    def with_paths(rows: Dataset) -> Dataset:
        """Rows whose paths are relative to the current folder; rows with images are not changed."""
        column = image_column(rows, requested, source)
        if not is_text(rows, column):
            return rows
        table: pa.Table = rows.with_format("arrow")[:]
        paths = [str(folder / path) if path else "" for path in table.column(column).to_pylist()]
        return Dataset(table.set_column(table.column_names.index(column), column, pa.array(paths, pa.string())))

    return SplitRows({split: with_paths(rows) for split, rows in splits.items()}, splits.origins)


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


def _folder_rows(folder: Path) -> Dataset:
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

        self._use("cannot be decoded", lambda content: PIL.Image.open(io.BytesIO(content)).load())

    def pixels(self, processor: Any) -> np.ndarray:
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
        content = self.content
        if content is None:
            try:
                content = Path(self.path).read_bytes()
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise self.unusable(f"cannot be read ({reason})") from error
        try:
            return use(content)
        except Exception as error:
            # Pillow's message names an object in memory.
            raise self.unusable(f"{problem} ({one_line(error).partition(' <_io')[0]})") from error


def image_sources(rows: Dataset, column: str, source: str) -> Iterator[ImageSource]:
    """The images of rows; few are in memory at once.

    Raises:
        InputError: a row has no image.
    """
    chunks = rows.select_columns(column).with_format("arrow").iter(batch_size=_CHUNK_ROWS)
    cells = itertools.chain.from_iterable(chunk.column(0).to_pylist() for chunk in chunks)
    for row, cell in enumerate(cells, 1):
        if isinstance(cell, dict):
            content, path = cell["bytes"], cell["path"]
        else:
            content, path = (cell, "") if isinstance(cell, bytes) else (None, cell)
        image = ImageSource(content or None, path or "", source, row, column)
        if not content and not path:
            raise image.unusable("is empty")
        yield image


def read_pixels(source: str, folder: Path, maximum: int, *, requested: str | None = None) -> np.ndarray:
    """The first images of a source, `[images, channel, height, width]`.

    The rows are those of the test split, else of the evaluation split, else of the first split.

    Args:
        source: a folder of images, a file of rows, or the name of a data set.
        folder: the folder of a model with an image processor.
        requested: the column of images in files of rows; None: the usual names.

    Raises:
        InputError: the folder has no image processor, or the source or an image cannot be read.
        TargetMissingError: a library that the image processor needs is not installed.
    """
    processor = load_processor(folder, images=True)
    require_processor(processor, folder, images=True)
    splits = image_splits(source, requested)
    split = pick_any(splits, "test", "eval")
    images = image_sources(splits[split], image_column(splits[split], requested, source), source)
    with splits.origins[split].located():
        return np.stack([image.pixels(processor) for image in itertools.islice(images, maximum)])


_TOP = 5


class ImageRows(LabelledRows):
    """The base class of tasks whose rows hold an image, or the path of its file, and a label.

    Images are decoded and processed when a batch is collated, so that the pixels of few images are in memory.
    """

    name = IMAGE_CLASSIFICATION
    label_type: ClassVar[DTypeLike] = np.int64

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        self._processor = folder.processor
        self._size = folder.image_size

    @classmethod
    def check_processor(cls, folder: ModelFolder) -> None:
        """Raise InputError unless the folder has an image processor, or TargetMissingError without its libraries."""
        if find_spec("PIL") is None:
            raise TargetMissingError.of_package("pillow", "images", "Pillow is not installed, which reads images")
        require_processor(folder.processor, folder.path, images=True)

    def read(self, source: str) -> SplitRows:
        """The rows of a folder of images, of files of rows, or of a data set; see `images.image_splits`."""
        self.notes = (*self.notes, *skipped_files(source))
        return image_splits(source, self._request.image_column)

    def _find_labels(self, rows: Dataset, source: str) -> str:
        if self._request.label_column is None and rows.column_names == [IMAGE]:
            text = f"{source}: its images have no labels; sort them into a subfolder for each class"
            raise InputError(text, code=ErrorCode.COLUMN_MISSING, field="label_column", columns=(IMAGE,))
        return super()._find_labels(rows, source)

    def encode_with(self, rows: Dataset, labels: Iterable[Any], source: str) -> Dataset:
        """Encode labels; images are opened, but stay files or bytes until they are collated.

        Columns: the fields of `ImageSource`; `file`, which reports show; `ImageSource.digest`; `labels`; and `length`,
        which is 1.

        Raises:
            InputError: a column is missing, or a row has no image that can be opened.
        """
        column = image_column(rows, self._request.image_column, source)
        remaining, images = iter(labels), image_sources(rows, column, source)
        settings = json.dumps(image_settings(self._processor), sort_keys=True, default=str)
        kind = pa.list_(pa.float64()) if np.dtype(self.label_type).kind == "f" else pa.int64()
        schema = pa.schema([*_SOURCE_COLUMNS, ("labels", kind), ("length", pa.int64())])
        store = RowStore()
        for _ in range(0, max(1, len(rows)), _CHUNK_ROWS):
            chunk = list(itertools.islice(images, _CHUNK_ROWS))
            columns = {field.name: [getattr(image, field.name) for image in chunk] for field in fields(ImageSource)}
            columns["file"] = ["/".join(Path(image.path).parts[-2:]) for image in chunk]
            columns["digest"] = [image.digest(settings) for image in chunk]
            columns["labels"] = list(itertools.islice(remaining, len(chunk)))
            store.add(pa.table({**columns, "length": [1] * len(chunk)}, schema))
        return store.finish()

    def locate(self, encoded: Dataset, origin: RowOrigin) -> Dataset:
        """Replace `source` and `row` of examples by the file of each row, if it has one, and its number there."""
        table: pa.Table = encoded.data.table
        files, numbers = origin.locate(np.arange(len(encoded)))
        sources = [source if file is None else str(file) for file, source in zip(files, encoded["source"], strict=True)]
        for name, values in (("source", pa.array(sources, pa.string())), ("row", pa.array(numbers, pa.int64()))):
            table = table.set_column(table.column_names.index(name), name, values)
        return Dataset(table, fingerprint=generate_random_fingerprint())

    def check_files(self, examples: Dataset) -> None:
        """Raise InputError for an image that cannot be decoded, e.g. because its file is truncated."""
        for example in examples:
            _source_of(example).decode()

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """`pixel_values` `[batch, channel, height, width]` and `labels` `[batch, ...]`.

        Raises:
            InputError: an image cannot be decoded, or the processor refuses it.
        """
        labels = np.array([example["labels"] for example in examples], self.label_type)
        pixels = []
        for image in map(_source_of, examples):
            pixels.append(image.pixels(self._processor))
            if (shape := pixels[-1].shape) != self._size:
                raise image.unusable(f"becomes {list(shape)}, other images {list(self._size or ())}")
        return {"pixel_values": np.stack(pixels), "labels": labels}


class ImageClassification(ClassLabels, ImageRows):
    """Classification of images by the largest logit, scored by accuracy or top-5 accuracy; see `ImageRows`.

    Raises:
        UsageError: the metric is top-5 accuracy, and the model has at most five classes.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (ACCURACY, share("top5", partial(column_mean, 0)))

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        classes = int(folder.config.num_labels or 0)
        if metric.name == "top5" and classes <= _TOP:
            text = f"--metric top5: the model has {classes} classes, so every answer would count as right; use accuracy"
            raise UsageError(text, code=ErrorCode.OUT_OF_RANGE, field="metric", value="top5", classes=classes)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Predicted and true class of each example, `[batch, 2]`, from logits `[batch, classes]`.

        For top-5 accuracy, 1 if the true class is among the five with the largest logits, else 0, `[batch, 1]`.
        """
        if self._metric.name != "top5":
            return super().per_example(logits, labels)
        largest = np.argsort(-logits, axis=-1, kind="stable")[:, :_TOP]
        return (largest == labels[:, None]).any(1, keepdims=True).astype(np.float64)

    def constant_score(self, statistics: np.ndarray) -> float | None:
        """The best score of the same class for every example; None for top-5 accuracy."""
        return None if self._metric.name == "top5" else super().constant_score(statistics)


class MultiLabelImages(SeveralClasses, ImageRows):
    """Classification of images by a logit for each class; see `ImageRows`."""

    @classmethod
    def accepts(cls, folder: ModelFolder) -> bool:
        return answer_kind(folder.config) is AnswerKind.CLASSES


def _source_of(example: Mapping[str, Any]) -> ImageSource:
    return ImageSource(**{field.name: example[field.name] for field in fields(ImageSource)})
