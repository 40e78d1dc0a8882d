"""Whether a model can teach another: the same tokens, labels, layers and widths."""

from __future__ import annotations

import json
from typing import Any

from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.processor import image_settings
from compressor.models.pooled_encoder import SentenceEncoder

_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
"""Fields of configurations with the number of layers of a decoder."""
_TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor")
"""Keys of `tokenizer.json` that decide which tokens a text becomes."""


def require_same_interface(teacher: ModelFolder, student: ModelFolder, *, compares_hidden: bool) -> None:
    """Raise unless a teacher has the tokens and labels of the student, and layers that correspond to its own."""

    def refuse(difference: str, code: ErrorCode, **details: Any) -> InputError:
        return InputError(
            f"{teacher.path}: {difference}; choose another teacher (--teacher), or omit it to learn from the model"
            " itself",
            code=code,
            field="teacher",
            path=teacher.path,
            **details,
        )

    if _vocabulary(teacher) != _vocabulary(student):
        raise refuse("its tokenizer has another vocabulary than that of the model", ErrorCode.FILE_MISMATCH)
    part = differing_tokenizer_part(teacher.processor, student.processor)
    if part is not None:
        text = f"its tokenizer splits texts otherwise than that of the model (the {part} of tokenizer.json differs)"
        raise refuse(text, ErrorCode.FILE_MISMATCH, part=part)
    if _image_settings(teacher) != _image_settings(student):
        raise refuse("its image processor makes other pixels than that of the model", ErrorCode.FILE_MISMATCH)
    if teacher.config.num_labels != student.config.num_labels or teacher.task != student.task:
        raise refuse("its task or its labels are not those of the model", ErrorCode.LABEL_MISMATCH)
    labels = [getattr(folder.config, "id2label", None) for folder in (teacher, student)]
    if labels[0] != labels[1]:
        raise refuse("its labels are not those of the model", ErrorCode.LABEL_MISMATCH)
    sizes = [
        [getattr(folder.config, name, None) for name in ("num_hidden_layers", "hidden_size", *_DECODER_LAYERS)]
        for folder in (teacher, student)
    ]
    widths = [folder.model.width for folder in (teacher, student) if isinstance(folder.model, SentenceEncoder)]
    if len(set(widths)) > 1:
        text = f"its embeddings have the width {widths[0]}, those of the model {widths[1]}"
        raise refuse(text, ErrorCode.FILE_MISMATCH)
    if compares_hidden and sizes[0] != sizes[1]:
        raise refuse(
            f"it has {sizes[0][0]} layers of width {sizes[0][1]}, the model {sizes[1][0]} of {sizes[1][1]}, or their"
            " decoders differ, so hidden states cannot be compared (--hidden-weight 0 learns the outputs alone)",
            ErrorCode.FILE_MISMATCH,
        )


def _image_settings(folder: ModelFolder) -> object:
    """The settings by which images are processed; None for a model of other inputs."""
    return None if folder.image_size is None else image_settings(folder.processor)


def _vocabulary(folder: ModelFolder) -> object:
    """The tokens and their ids; None for a model without a tokenizer."""
    vocabulary = getattr(folder.processor, "get_vocab", None)
    return None if vocabulary is None else vocabulary()


def differing_tokenizer_part(first: Any, second: Any) -> str | None:
    """The first part of two fast tokenizers by which equal texts become different tokens; None: there is none.

    Truncation and padding are not compared: they change whenever texts are encoded. Slow tokenizers have no parts.

    Args:
        first: a tokenizer, or whatever else a folder processes its inputs with.
        second: another one.
    """
    processors = (first, second)
    if not all(hasattr(processor, "backend_tokenizer") for processor in processors):
        return None
    parts = [json.loads(processor.backend_tokenizer.to_str()) for processor in processors]
    return next((name for name in _TOKENIZER_PARTS if parts[0].get(name) != parts[1].get(name)), None)
