"""Tokenizers made from a text: its words, or its letters."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compressor.errors import InputError

UNKNOWN, END = "<unk>", "<eos>"


def words(texts: Iterable[str], size: int | None = None) -> PreTrainedTokenizerFast:
    """Every word between spaces a token, the most frequent first; `<eos>` stands for the end of a line.

    Args:
        texts: lines or rows.
        size: most tokens, `<unk>` and `<eos>` among them; None: all words.

    Raises:
        InputError: there is no word.
    """
    counts = Counter(word for text in texts for word in text.split())
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    if not ranked:
        raise InputError("the text holds no word; give more text")
    known = list(dict.fromkeys([UNKNOWN, END, *ranked]))[:size]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(known)}, unk_token=UNKNOWN))
    made.normalizer = normalizers.Replace("\n", f" {END} ")
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token=UNKNOWN, eos_token=END)


def characters() -> PreTrainedTokenizerFast:
    """The letters a to z and the space: text is lower-cased, and a run of anything else is one space.

    The alphabet of text8, whose own text is left as it is; digits are not spelled out, as they were to make text8.
    """
    known = [" ", *string.ascii_lowercase]
    made = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(known)}, unk_token=" "))
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[^a-z]+"), " ")])
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)
