"""The files that openvino-genai reads beside the engine of a decoder: its tokenizer as two graphs."""

from __future__ import annotations

from pathlib import Path

import openvino

from compressor.silence_libraries import one_line
from compressor.targets.caches import GeneratingModel
from compressor.targets.openvino.stateful import ALONE

_FILES = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")


def write_tokenizer(folder: Path, model: GeneratingModel) -> str | None:
    """Write the tokenizer of a decoder-only model.

    Args:
        folder: the folder of the engine.

    Returns:
        Why openvino-genai cannot load the folder, or not from texts; None: it can.
    """
    if not (folder / ALONE).is_file() or model.config.get("is_encoder_decoder"):
        return "it runs no encoder-decoder models from these graphs"
    if model.tokenizer is None:
        return "the model has no tokenizer; pass ids and not texts"
    try:
        from openvino_tokenizers import convert_tokenizer
    except ImportError:
        return (
            "the tokenizer is not converted: pip install openvino-tokenizers, and convert_tokenizer OUT"
            " --with-detokenizer -o OUT"
        )
    try:
        parts = convert_tokenizer(model.tokenizer, with_detokenizer=True)
    except Exception as error:  # of any tokenizer
        return f"openvino-tokenizers cannot convert the tokenizer ({one_line(error)}); pass ids and not texts"
    for file, part in zip(_FILES, parts, strict=True):
        openvino.save_model(part, folder / file)
    return None
