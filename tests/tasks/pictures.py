"""Tiny image classifiers, and images of two classes that they can learn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import transformers as hf

from compressor.model_folder import ModelFolder, load

SIZE = 16
CLASSES = ("bright", "dark", "grey")


def vit(classes: int = 3, *, names: Sequence[str] = ()) -> hf.PreTrainedModel:
    """A ViT of one layer for images of 16 × 16 pixels.

    Args:
        classes: number of classes.
        names: their names; empty: `CLASSES`, and numbered ones after these.
    """
    named = dict(enumerate(names or [*CLASSES, *(f"class {number}" for number in range(3, classes))]))
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    labels: dict[str, Any] = {"id2label": named, "label2id": {name: number for number, name in named.items()}}
    torch.manual_seed(0)
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **labels, image_size=SIZE, patch_size=8))


def save_classifier(path: Path, model: hf.PreTrainedModel | None = None, **settings: Any) -> Path:
    """Write a model folder with an image processor for 16 × 16 pixels."""
    (model or vit()).save_pretrained(path)
    size = settings.pop("size", {"height": SIZE, "width": SIZE})
    hf.ViTImageProcessorPil(size=size, **settings).save_pretrained(path)
    return path


def picture(number: int) -> PIL.Image.Image:
    """An image of class `number % 3`, of another size than the model reads."""
    rng = np.random.default_rng(number)
    brightness = (200, 20, 110)[number % 3]
    shape = (12 + number % 5, 20 - number % 3, 3)
    return PIL.Image.fromarray((brightness + rng.integers(0, 40, shape)).astype(np.uint8))


def png(number: int) -> bytes:
    """The bytes of a PNG file with `picture(number)`."""
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return file.getvalue()


def truncate(path: Path, image_format: str) -> None:
    """Write an image whose file ends in the middle of its pixels."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3))
    PIL.Image.fromarray(noise.astype(np.uint8)).save(file, image_format)
    path.write_bytes(file.getvalue()[: file.tell() // 2])


def write_folder(path: Path, count: int, *, labelled: bool = True) -> Path:
    """A folder with a subfolder of images for each class, or with all images."""
    for number in range(count):
        folder = path / CLASSES[number % 3] if labelled else path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03}.png").write_bytes(png(number))
    return path


def classifier(path: Path, **fields: Any) -> ModelFolder:
    """A loaded folder with a ViT; see `save_classifier`."""
    return load(save_classifier(path, **fields))
