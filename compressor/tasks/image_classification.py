"""Image classification: predict one of several classes from an image."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from datasets.fingerprint import generate_random_fingerprint
from torch import Tensor

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, TargetMissingError, UsageError
from compressor.model_folder import ModelFolder, require_processor
from compressor.model_folder.processor import IMAGE_CLASSIFICATION, image_settings
from compressor.models.classifiers import AnswerKind, answer_kind
from compressor.results import MetricUnit
from compressor.tasks.images import (
    IMAGE,
    ImageSource,
    image_column,
    image_sources,
    image_splits,
    skipped_files,
    source_table,
)
from compressor.tasks.labelled_rows import ClassLabels, LabelledRows
from compressor.tasks.metrics import Metric, accuracy, column_mean
from compressor.tasks.row_origin import RowOrigin, SplitRows
from compressor.tasks.row_store import RowStore
from compressor.tasks.several_classes import SeveralClasses

_TOP = 5
_STORED_ROWS = 256
"""Number of rows that are added to the store at once."""


class ImageRows(LabelledRows):
    """The base class of tasks whose rows hold an image, or the path of its file, and a label.

    Images are decoded and processed when a batch is collated, so that the pixels of few images are in memory.
    """

    name = IMAGE_CLASSIFICATION
    label_type: ClassVar[torch.dtype] = torch.int64

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
        """The name of the column of labels; raise InputError for a folder of images without classes."""
        if self._request.label_column is None and rows.column_names == [IMAGE]:
            text = f"{source}: its images have no labels; sort them into a subfolder for each class"
            raise InputError(text, code=ErrorCode.COLUMN_MISSING, field="label_column", columns=(IMAGE,))
        return super()._find_labels(rows, source)

    def encode_with(self, rows: Dataset, labels: Iterable[Any], source: str) -> Dataset:
        """Encode labels; images are opened, but stay files or bytes until they are collated.

        Columns: those of `images.source_table`, `labels`, and `length`, which is 1.

        Raises:
            InputError: a column is missing, or a row has no image that can be opened.
        """
        column = image_column(rows, self._request.image_column, source)
        remaining, images = iter(labels), image_sources(rows, column, source)
        settings = json.dumps(image_settings(self._processor), sort_keys=True, default=str)
        kind = pa.list_(pa.float64()) if self.label_type.is_floating_point else pa.int64()
        store = RowStore()
        for _ in range(0, max(1, len(rows)), _STORED_ROWS):
            chunk = list(itertools.islice(images, _STORED_ROWS))
            values = pa.array(itertools.islice(remaining, len(chunk)), kind)
            table = source_table(chunk, settings).append_column("labels", values)
            store.add(table.append_column("length", pa.array([1] * len(chunk), pa.int64())))
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

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`pixel_values` `[batch, channel, height, width]` and `labels` `[batch, ...]`.

        Raises:
            InputError: an image cannot be decoded, or the processor refuses it.
        """
        labels = torch.tensor([example["labels"] for example in examples], dtype=self.label_type)
        return {"pixel_values": torch.stack([self._pixels(example) for example in examples]), "labels": labels}

    def _pixels(self, example: Mapping[str, Any]) -> Tensor:
        """The pixels of an example."""
        image = _source_of(example)
        pixels = image.pixels(self._processor)
        if tuple(pixels.shape) != self._size:
            raise image.unusable(f"becomes {list(pixels.shape)}, other images {list(self._size or ())}")
        return pixels


class ImageClassification(ClassLabels, ImageRows):
    """Classification of images by the largest logit, scored by accuracy or top-5 accuracy; see `ImageRows`.

    Raises:
        InputError: the model assigns several classes to an example.
        UsageError: the metric is top-5 accuracy, and the model has at most five classes.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", accuracy, MetricUnit.POINTS, maximum=1.0),
        Metric("top5", partial(column_mean, 0), MetricUnit.POINTS, maximum=1.0),
    )

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        classes = int(folder.config.num_labels or 0)
        if metric.name == "top5" and classes <= _TOP:
            raise UsageError(
                f"--metric top5: the model has {classes} classes, so that every answer would count; use accuracy",
                code=ErrorCode.OUT_OF_RANGE,
                field="metric",
                value="top5",
                classes=classes,
            )

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
    """Classification of images by a logit for each class; see `ImageRows`.

    Raises:
        InputError: there is not a threshold for each class.
    """

    @classmethod
    def accepts(cls, folder: ModelFolder) -> bool:
        """Whether the model assigns several classes to an image."""
        return answer_kind(folder.config) is AnswerKind.CLASSES


def _source_of(example: Mapping[str, Any]) -> ImageSource:
    """The image of an example."""
    return ImageSource(**{field.name: example[field.name] for field in fields(ImageSource)})
