"""Texts of a file of rows and the tokenizer of a folder, for a model of which only the graph is available."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from compressor.model_folder import load_processor
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.columns import TextColumns
from compressor.tasks.splits import named_splits, pick
from compressor.tasks.tagged_words import word_column, words_of


def read_texts(source: str, columns: Sequence[str], maximum: int) -> list[tuple[str, ...]]:
    """The first texts of a file or a data set, one or two per row.

    The rows are those of the test split, else of the evaluation split, else of the first one. Words are joined where
    there is no text.

    Args:
        source: a file of rows, or the name of a Hugging Face data set.
        columns: the columns of text; empty: those with usual names.
        maximum: maximum number of rows.

    Raises:
        InputError: the source cannot be read, or has no column of text.
    """
    splits = named_splits(source)
    split = pick(splits, "test") or pick(splits, "eval") or next(iter(splits))
    with splits.origins[split].located():
        return _texts_of(splits[split].select(range(min(maximum, len(splits[split])))), columns, source)


def _texts_of(rows: Dataset, columns: Sequence[str], source: str) -> list[tuple[str, ...]]:
    """The texts of every row, or its words, joined."""
    texts, words = TextColumns(), word_column(rows, columns)
    if words is not None and (columns or not texts.find_usual(rows)):
        return [(" ".join(sentence),) for sentence in words_of(rows, words, source)]
    return list(zip(*(list(rows[name]) for name in texts.find(rows, columns, source)), strict=True))


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a model folder, or None; one without a padding token pads with its end-of-text token.

    Raises:
        InputError: its files cannot be read.
    """
    with quiet_transformers():
        processor = load_processor(folder)
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is not None and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
