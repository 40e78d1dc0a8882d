"""Tokenizers for training from scratch: of the words of a text, or of letters."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compressor.errors import ErrorCode, InputError

UNKNOWN, END = "<unk>", "<eos>"


def words(texts: Iterable[str], size: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per whitespace-separated word, most frequent first; `<eos>` ends a line.

    Args:
        texts: lines or rows.
        size: maximum number of tokens, including `<unk>` and `<eos>`; None: all words.

    Raises:
        InputError: the texts contain no word.
    """
    counts = Counter(word for text in texts for word in text.split())
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    if not ranked:
        raise InputError("the text contains no word; give more text", code=ErrorCode.INVALID_ROWS)
    vocabulary = list(dict.fromkeys([UNKNOWN, END, *ranked]))[:size]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace("\n", f" {END} ")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN, eos_token=END)


def characters() -> PreTrainedTokenizerFast:
    """A tokenizer of the letters a to z and the space; text is lower-cased, and runs of anything else become a space.

    This is the alphabet of text8: encoding leaves the text of text8 unchanged. Unlike in the preparation of text8,
    digits are not spelled out.
    """
    vocabulary = [" ", *string.ascii_lowercase]
    tokenizer = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(vocabulary)}, unk_token=" "))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[^a-z]+"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
