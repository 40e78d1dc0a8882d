"""The tokenizer or processor of a model folder, and the size of the images that an image processor returns."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.config.tasks import SEQUENCE_CLASSIFIERS
from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.model_folder.tokenizer_file import TOKENIZER_FILE, TokenizerFile
from compressor.silence_libraries import one_line, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMAGES = "pixel_values"
"""Name of the input that holds images."""
_TOKENIZER_FILES = ("tokenizer_config.json", TOKENIZER_FILE)
PREPROCESSOR = "preprocessor_config.json"
_IMAGE_FILES = (PREPROCESSOR, "processor_config.json")
_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "source.spm")
IMAGE_CLASSIFICATION = "image-classification"
_BLANK_SIZES = ((96, 64), (64, 96))
"""Width and height of a wide and a high image, by which the size that a processor returns is known."""
ImageSize = tuple[int, int, int]
"""Channels, height and width of an image."""


def load_processor(path: Path, trust_remote_code: bool = False, *, images: bool = False, texts: bool = False) -> Any:
    """The tokenizer or processor of a folder; None if it has none, or one whose libraries are not installed.

    Args:
        images: return the image processor alone if the processor has several parts.
        texts: return the tokenizer alone; transformers, which takes long to load, is not if there is `tokenizer.json`.

    Raises:
        InputError: its files cannot be read.
        TargetMissingError: transformers is not installed, and the folder has another processor than `tokenizer.json`.
    """
    try:
        if texts and (path / TOKENIZER_FILE).is_file():
            return TokenizerFile(path)
        return _load(path, trust_remote_code, images)
    except ImportError:
        return None  # only runs that read rows need the libraries of a processor; see `require_processor`
    except TargetMissingError:
        raise
    except Exception as error:
        # Any value in the files of a tokenizer or processor can raise any error.
        text = f"its tokenizer or processor cannot be loaded ({one_line(error)}); copy its files again"
        raise InputError.of_file(path, text, ErrorCode.FILE_UNREADABLE, reason=one_line(error)) from error


def require_processor(processor: Any, path: Path, *, images: bool = False) -> None:
    """Raise an error if `load_processor` returned None.

    Args:
        images: whether the image processor was loaded alone.

    Raises:
        InputError: the folder has no processor.
        TargetMissingError: a library that the processor needs is not installed.
    """
    if processor is not None:
        return
    kind = "image processor" if images else "tokenizer"
    with suppress(ValueError):  # code of the folder that needs permission
        try:
            _load(path, False, images)
        except ImportError as error:
            text = f"{path}: a library that its {kind} needs is missing ({one_line(error)}); install the library"
            raise TargetMissingError(text, code=ErrorCode.PACKAGE_MISSING, path=path, reason=one_line(error)) from error
    text = f"{path}: no {kind}; save that of the model there ({kind.replace(' ', '_')}.save_pretrained)"
    raise InputError(text, code=ErrorCode.FILE_MISSING, path=path / (PREPROCESSOR if images else "tokenizer.json"))


def _load(path: Path, trust_remote_code: bool, images: bool) -> Any:
    """The tokenizer or processor of a folder; None without its files."""
    files = _IMAGE_FILES if images else (*_TOKENIZER_FILES, *_IMAGE_FILES, *_VOCABULARIES)
    if not any((path / name).is_file() for name in files):
        return None
    if find_spec("transformers") is None:
        if not images and (path / TOKENIZER_FILE).is_file():
            return TokenizerFile(path)
        text = f"{path}: its {'image processor' if images else 'tokenizer'} needs transformers, which is not installed"
        text += "" if images else f" (only {TOKENIZER_FILE} is read without it)"
        raise TargetMissingError.of_package("transformers", "cpu", text, path=path)
    from transformers import AutoImageProcessor, AutoProcessor

    loader = AutoImageProcessor if images else AutoProcessor
    with quiet_transformers():
        return loader.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)


def set_padding_token(model: PreTrainedModel, task: str, processor: Any) -> None:
    """Set the padding token of a classifier without one, since it classifies at the last token that is not padding.

    Tokenizers of language models often have no padding token; their end token is used instead.
    """
    config = model.config.get_text_config()
    padding = getattr(config, "pad_token_id", None)
    if task in SEQUENCE_CLASSIFIERS and (padding is None or padding < 0):
        ids = [getattr(holder, f"{kind}_token_id", None) for kind in ("pad", "eos") for holder in (processor, config)]
        config.pad_token_id = next((token for token in ids if isinstance(token, int) and token >= 0), 0)


def pixels_of(content: bytes, processor: Any) -> np.ndarray:
    """The pixels `[channel, height, width]` that an image processor of transformers returns for an upright RGB image.

    Raises:
        Exception: `content` is not an image file, or the processor refuses it; the error may have any type.
    """
    import PIL.Image  # not installed on a machine that only reads texts
    from transformers.image_utils import load_image

    with PIL.Image.open(io.BytesIO(content)) as image:
        return _process(load_image(image), processor)


def image_settings(processor: Any) -> dict[str, Any]:
    """The settings of an image processor of transformers, without the name of its class."""
    return {name: value for name, value in processor.to_dict().items() if not name.endswith(("type", "class"))}


def processed_size(path: Path, processor: Any) -> ImageSize:
    """The size of the images that the image processor of a folder returns.

    Raises:
        InputError: it returns images of several sizes.
    """
    import PIL.Image

    file = path / PREPROCESSOR
    try:
        shapes = {tuple(_process(PIL.Image.new("RGB", size), processor).shape) for size in _BLANK_SIZES}
    except Exception as error:
        # Any setting of a processor can raise any error.
        text = f"an image cannot be processed ({one_line(error)}); copy the file of the model again"
        raise _refuse(file, text, ErrorCode.FILE_UNREADABLE) from error
    (shape, *further) = sorted(shapes)
    if further or len(shape) != 3:
        text = f"images become {' or '.join(map(_size_text, sorted(shapes)))}, but an engine reads images of one size"
        raise _refuse(file, f"{text}; set size, or crop_size, to a height and a width", ErrorCode.UNSUPPORTED_MODEL)
    channels, height, width = shape
    return channels, height, width


def readable_size(path: Path, run: Callable[[dict[str, np.ndarray]], Any], processor: Any) -> ImageSize:
    """The size of the images that the image processor of a folder returns, which a model reads; `run` runs it.

    Raises:
        InputError: it returns images of several sizes, or of a size that the model cannot read.
    """
    shape = processed_size(path, processor)
    try:
        run({IMAGES: np.zeros((1, *shape), np.float32)})
    except Exception as error:  # each family checks sizes in its own way
        text = f"images become {_size_text(shape)}, which the model does not read ({one_line(error)}); correct the size"
        raise _refuse(path / PREPROCESSOR, text, ErrorCode.FILE_MISMATCH) from error
    return shape


def _process(image: Any, processor: Any) -> np.ndarray:
    """The pixels of a decoded image in RGB."""
    pixels: np.ndarray = processor(images=image, return_tensors="pt")[IMAGES][0].numpy()
    return pixels


def _size_text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _refuse(file: Path, text: str, code: ErrorCode) -> InputError:
    return InputError.of_file(file, f"{text}", code, field="size")
