"""Texts for a model that is there as a graph alone: rows of a file, and the tokenizer of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.model_folder import load_processor
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.columns import text_columns
from compressor.tasks.splits import named_splits, pick


def read_texts(source: str, columns: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """The first texts of a file or a data set, one or a pair a row; of its test or evaluation split where it has one.

    Args:
        source: a file of rows, or a Hugging Face data set.
        columns: of text; else found by name.
        most: rows at most.

    Raises:
        InputError: it cannot be read, or has no column of text.
    """
    splits = named_splits(source)
    rows = splits[pick(splits, "test") or pick(splits, "eval") or next(iter(splits))]
    rows = rows.select(range(min(most, len(rows))))
    return list(zip(*(list(rows[name]) for name in text_columns(rows, columns, source)), strict=True))


def tokenizer_of(folder: Path) -> Any:
    """The folder's tokenizer, None where it has none; one without a padding token pads with its end of text.

    Raises:
        InputError: its files do not read.
    """
    with quiet_transformers():
        made = load_processor(folder)
    made = getattr(made, "tokenizer", made)
    if made is not None and made.pad_token is None:
        made.pad_token = made.eos_token
    return made
