"""Texts of a file of rows, and the tokenizer of a folder, for a model that is only available as a graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.model_folder.processor import load_processor
from compressor.model_folder.sentence_texts import SentenceTexts
from compressor.model_folder.tokenizer_file import Encodings
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.columns import TextColumns
from compressor.tasks.sentence_similarity import SentenceSimilarity
from compressor.tasks.splits import named_splits, pick_any
from compressor.tasks.token_labels import word_column, words_of


def read_texts(
    source: str, columns: Sequence[str], maximum: int, sentence: SentenceTexts | None = None
) -> list[tuple[str, ...]]:
    """The first texts of a file or a data set, one or two for each row.

    The rows are those of the test split, else of the evaluation split, else of the first split. Words are joined if
    there is no text.

    Args:
        source: a file of rows, or the name of a Hugging Face data set.
        columns: the columns of text; empty: those with usual names.
        sentence: how the texts of a sentence encoder are prepared; None for other models. It changes the usual names.

    Raises:
        InputError: the source cannot be read, or has no column of text.
    """
    splits = named_splits(source)
    split = pick_any(splits, "test", "eval")
    texts = TextColumns() if sentence is None else SentenceSimilarity.text_columns
    rows = splits[split].select(range(min(maximum, len(splits[split]))))
    with splits.origins[split].located():
        words = word_column(rows, columns)
        if words is not None and (columns or not texts.find_usual(rows)):
            return [(" ".join(sentence),) for sentence in words_of(rows, words, source)]
        return list(zip(*(rows[name][:] for name in texts.find(rows, columns, source)), strict=True))


def model_texts(rows: Sequence[tuple[str, ...]], sentence: SentenceTexts | None) -> list[tuple[str, ...]]:
    """The examples that a model reads, from one or two texts for each row.

    For a sentence encoder, every text with the default prompt is an example; other models read rows as they are.
    """
    if sentence is None:
        return list(rows)
    return [(sentence.prepare(text),) for row in rows for text in row]


def tokenize(
    tokenizer: Any, rows: Sequence[tuple[str, ...]], sentence: SentenceTexts | None, *, shortest: int, longest: int
) -> Encodings:
    """Ids, masks and token types of examples with equal numbers of texts, see `model_texts`.

    Examples with fewer tokens than `shortest` are padded; those with more than `longest`, or than a sentence encoder
    reads, are truncated.
    """
    if sentence is not None:
        longest = min(longest, tokenizer.model_max_length, sentence.max_tokens or longest)
    with quiet_transformers():
        encoded: Encodings = tokenizer(
            *map(list, zip(*rows, strict=True)),
            truncation=True,
            max_length=longest,
            return_attention_mask=True,
            return_token_type_ids=True,
        )
        if min(map(len, encoded["input_ids"])) < shortest:
            encoded = tokenizer.pad(encoded, padding="max_length", max_length=shortest)
    return encoded


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a model folder, or None; without a padding token, it pads with its end-of-text token.

    Raises:
        InputError: its files cannot be read.
    """
    processor = load_processor(folder)
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is not None and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
