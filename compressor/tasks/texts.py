"""Texts for a model that is there as a graph alone: rows of a file, and the tokenizer of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.errors import InputError
from compressor.quiet import one_line, quiet_transformers
from compressor.tasks.columns import text_columns
from compressor.tasks.splits import named_splits, pick

_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")


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


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has files of one."""
    return any((folder / name).is_file() for name in _FILES)


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; one without a padding token pads with its end of text.

    Raises:
        InputError: the folder has none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        raise InputError(f"{folder}: has no tokenizer; name the model's folder")
    with quiet_transformers():
        try:
            made = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # readers of tokenizers raise anything
            raise InputError(
                f"{folder}: its tokenizer cannot be read ({one_line(error)}); copy it there again"
            ) from error
        if made.pad_token is None:
            made.pad_token = made.eos_token
    return made
