"""Whether a model can teach another: the same tokens, labels, layers and widths."""

from __future__ import annotations

from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.image_processor import image_settings

_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
"""Fields of configurations with the number of layers of a decoder."""


def require_same_interface(teacher: ModelFolder, student: ModelFolder, *, compares_hidden: bool) -> None:
    """Raise unless a teacher has the tokens and labels of the student, and layers that correspond to its own."""

    def refuse(difference: str, code: ErrorCode) -> InputError:
        return InputError(
            f"{teacher.path}: {difference}; choose another teacher (--teacher), or omit it to learn from the model"
            " itself",
            code=code,
            field="teacher",
            path=teacher.path,
        )

    if _vocabulary(teacher) != _vocabulary(student):
        raise refuse("its tokenizer has another vocabulary than that of the model", ErrorCode.FILE_MISMATCH)
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
    if student.sentence is not None and sizes[0][1] != sizes[1][1]:
        text = f"its embeddings have the width {sizes[0][1]}, those of the model {sizes[1][1]}"
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
