"""Images as a model reads them: decoded as transformers' pipelines do, in the one size that the processor makes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.image_utils import load_image

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.signals import IMAGES
from compressor.silence_libraries import one_line

IMAGE_CLASSIFICATION = "image-classification"
_BLANK_SIZES = ((96, 64), (64, 96))
"""Width and height of the images that show which size a processor makes: one is wide, one is high."""

ImageSize = tuple[int, int, int]
"""Channels, height and width of an image."""


def pixels_of(content: bytes, processor: Any) -> Tensor:
    """The pixels `[channel, height, width]` of an image file, upright and in RGB before they are processed.

    Args:
        content: the bytes of the file.
        processor: an image processor of transformers.

    Raises:
        Exception: the content is not an image, or the processor refuses it; both raise errors of any type.
    """
    import PIL.Image  # not installed on a machine that only reads texts

    with PIL.Image.open(io.BytesIO(content)) as image:
        return _process(load_image(image), processor)


def image_settings(processor: Any) -> dict[str, Any]:
    """The settings by which a processor makes pixels, without the name of its class.

    Args:
        processor: an image processor of transformers.
    """
    return {name: value for name, value in processor.to_dict().items() if not name.endswith(("type", "class"))}


def processed_size(path: Path, model: PreTrainedModel, processor: Any) -> ImageSize:
    """The size of the images that the processor of a folder makes.

    Args:
        path: the folder, for error messages.
        model: its model.
        processor: its image processor.

    Raises:
        InputError: it makes images of several sizes, or of one that the model cannot read.
    """
    import PIL.Image

    file = path / "preprocessor_config.json"
    try:
        shapes = {tuple(_process(PIL.Image.new("RGB", size), processor).shape) for size in _BLANK_SIZES}
    except Exception as error:
        # The settings of a processor are free-form: any value can raise any error.
        text = f"an image cannot be processed ({one_line(error)}); copy the file of the model again"
        raise _refuse(file, text, ErrorCode.FILE_UNREADABLE) from error
    (shape, *further) = sorted(shapes)
    if further or len(shape) != 3:
        text = f"images become {' or '.join(map(_size_text, sorted(shapes)))}, but an engine reads images of one size"
        raise _refuse(file, f"{text}; set size, or crop_size, to a height and a width", ErrorCode.UNSUPPORTED_MODEL)
    try:
        with torch.no_grad():
            model(**{IMAGES: torch.zeros(1, *shape)})
    except Exception as error:  # each family checks sizes in its own way
        text = f"images become {_size_text(shape)}, which the model does not read ({one_line(error)}); correct the size"
        raise _refuse(file, text, ErrorCode.FILE_MISMATCH) from error
    channels, height, width = shape
    return channels, height, width


def _process(image: Any, processor: Any) -> Tensor:
    """The pixels of a decoded image in RGB."""
    pixels: Tensor = processor(images=image, return_tensors="pt")[IMAGES][0]
    return pixels


def _size_text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _refuse(file: Path, text: str, code: ErrorCode) -> InputError:
    return InputError(f"{file}: {text}", code=code, path=file, field="size")
