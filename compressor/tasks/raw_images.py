"""Images of a source as the tensor of a model of which only the graph is available."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch

from compressor.model_folder import load_processor, require_processor
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.image_files import ImageColumn, image_splits
from compressor.tasks.image_sources import image_sources
from compressor.tasks.splits import pick_any


def read_pixels(source: str, folder: Path, maximum: int, *, requested: str | None = None) -> np.ndarray:
    """The first images of a source, `[rows, channel, height, width]`.

    The rows are those of the test split, else of the evaluation split, else of the first one.

    Args:
        source: a folder of images, a file of rows, or the name of a data set.
        folder: the folder of a model, whose image processor makes the pixels.
        maximum: maximum number of rows.
        requested: the column of images in files of rows; None: the usual names.

    Raises:
        InputError: the folder has no image processor, or the source or an image cannot be read.
        TargetMissingError: a library that the image processor needs is not installed.
    """
    with quiet_transformers():
        processor = load_processor(folder, images=True)
    require_processor(processor, folder, images=True)
    column = ImageColumn()
    splits = image_splits(source, column, requested)
    split = pick_any(splits, "test", "eval")
    images = image_sources(splits[split], column.find(splits[split], requested, source), source)
    with splits.origins[split].located():
        return torch.stack([image.pixels(processor) for image in itertools.islice(images, maximum)]).numpy()
