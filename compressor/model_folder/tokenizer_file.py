"""A tokenizer that is read from `tokenizer.json`, for an environment without transformers.

It has the part of the interface of transformers' tokenizers that this package uses, with the same results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, processors

TOKENIZER_FILE, _CONFIG, _SPECIAL_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_UNLIMITED = int(1e30)
"""The length that transformers gives a tokenizer without a maximum."""
_TYPES, _INPUTS = "token_type_ids", ("input_ids", "attention_mask")
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers whose models read no token types unless the configuration says so."""
_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_USUAL = {
    "bos": ("<s>", "<|endoftext|>"),
    "eos": ("</s>", "<|endoftext|>"),
    "unk": ("[UNK]", "<unk>", "<|endoftext|>"),
    "sep": ("[SEP]",),
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]",),
    "mask": ("[MASK]", "<mask>"),
}
"""The special tokens of a folder whose files name none, as far as `tokenizer.json` has them."""
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Parts of a decoded text whose spaces are removed where the configuration says so."""


class Encodings(dict[str, list[Any]]):
    """What a tokenizer returns for examples: lists with an entry for each, e.g. of `input_ids`, by name.

    Attributes:
        encodings: the encodings of the library `tokenizers`; empty if a tokenizer has none.
    """

    encodings: Sequence[Any] = ()

    def sequence_ids(self, index: int) -> list[int | None]:
        """The text, 0 or 1, of each token of an example; None for special tokens."""
        return list(self.encodings[index].sequence_ids)


class TokenizerFile:
    """The tokenizer of a folder.

    Args:
        folder: a folder with `tokenizer.json`, and `tokenizer_config.json` or `special_tokens_map.json`, which name
            special tokens; the former also has the maximum length and the side of padding.

    Attributes:
        model_max_length: maximum number of tokens of an example.
        padding_side: `right` or `left`.
        model_input_names: names of the inputs that a model of the tokenizer reads.
        pad_token: the padding token, or None; so are `bos_token`, `eos_token`, `unk_token`, `sep_token`, `cls_token`
            and `mask_token`, and the ids of all of them, `pad_token_id` and so on.
        chat_template: None: chats are not rendered.

    Raises:
        Exception: a file cannot be read; the error may have any type.
    """

    is_fast = True
    pad_token_type_id = 0
    chat_template = None
    pad_token: str | None

    def __init__(self, folder: Path) -> None:
        settings = _read(folder / _CONFIG)
        named = {**_read(folder / _SPECIAL_MAP), **settings}
        self._tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
        self.model_max_length = int(settings.get("model_max_length") or _UNLIMITED)
        self.padding_side = settings.get("padding_side", "right")
        self._truncation_side = settings.get("truncation_side", "right")
        self._cleans_up = settings.get("clean_up_tokenization_spaces") is True
        further = named.get("extra_special_tokens") or named.get("additional_special_tokens") or ()
        tokens = {kind: _added(named.get(f"{kind}_token")) for kind in _KINDS}
        if not any(tokens.values()):
            known = {str(token): token for token in self.added_tokens_decoder.values() if token.special}
            tokens = {kind: next((known[text] for text in _USUAL[kind] if text in known), None) for kind in _KINDS}
        for kind, token in tokens.items():
            setattr(self, f"{kind}_token", None if token is None else token.content)
        self._further = [token for token in map(_added, _values(further)) if token is not None]
        added = [_added(token) for _, token in sorted(settings.get("added_tokens_decoder", {}).items(), key=_number)]
        present = {token.content for token in self.added_tokens_decoder.values()}
        self._tokenizer.add_tokens([token for token in added if token is not None and token.content not in present])
        self._tokenizer.add_special_tokens([token for token in (*tokens.values(), *self._further) if token is not None])
        ends = [settings.get(f"add_{kind}_token") for kind in ("bos", "eos")]
        if self._tokenizer.post_processor is None or any(end is not None for end in ends):
            self._add_ends(*map(bool, ends))
        self.model_input_names = settings.get("model_input_names", list(_INPUTS))
        if "model_input_names" not in settings and settings.get("tokenizer_class") not in _PLAIN_CLASSES:
            is_typed = any(self._tokenizer.encode("", "").type_ids)  # by the ends of a second text
            self.model_input_names += [_TYPES] * is_typed

    def __getattr__(self, name: str) -> int | None:
        if not name.endswith("_token_id") or name.removesuffix("_token_id") not in _KINDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        token = getattr(self, name.removesuffix("_id"))
        return None if token is None else self._tokenizer.token_to_id(token)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def backend_tokenizer(self) -> Any:
        """The tokenizer of the library tokenizers, as transformers names it."""
        return self._tokenizer

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, each once."""
        named = (getattr(self, f"{kind}_token") for kind in _KINDS)
        return list(dict.fromkeys([token for token in named if token is not None] + [t.content for t in self._further]))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens."""
        return [self._tokenizer.token_to_id(token) for token in self.all_special_tokens]

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The tokens beside the vocabulary of the model, by id."""
        return dict(self._tokenizer.get_added_tokens_decoder())

    def get_vocab(self) -> dict[str, int]:
        """The id of every token."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Number of special tokens around a text, or around two."""
        return int(self._tokenizer.num_special_tokens_to_add(pair))

    def __call__(
        self,
        texts: Any = None,
        pairs: Any = None,
        *,
        text_target: Any = None,
        truncation: bool | str = False,
        max_length: int | None = None,
        stride: int = 0,
        add_special_tokens: bool = True,
        is_split_into_words: bool = False,
        return_attention_mask: bool | None = None,
        return_token_type_ids: bool | None = None,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_overflowing_tokens: bool = False,
        verbose: bool = True,
    ) -> Encodings:
        """Encode a text or a list of texts, or pairs of texts; see the tokenizers of transformers for the arguments."""
        texts = text_target if texts is None else texts
        is_single = isinstance(texts, str) or (is_split_into_words and not (texts and isinstance(texts[0], list)))
        if is_single:
            texts, pairs = [texts], None if pairs is None else [pairs]
        self._set_truncation(truncation, max_length, stride)
        rows = texts if pairs is None else list(zip(texts, pairs, strict=True))
        encoded = self._tokenizer.encode_batch(
            rows, add_special_tokens=add_special_tokens, is_pretokenized=is_split_into_words
        )
        parts = [[first, *first.overflowing] if return_overflowing_tokens else [first] for first in encoded]
        encodings = [encoding for of_row in parts for encoding in of_row]
        wanted = {
            "input_ids": ("ids", True),
            _TYPES: ("type_ids", return_token_type_ids),
            "attention_mask": ("attention_mask", return_attention_mask),
            "special_tokens_mask": ("special_tokens_mask", return_special_tokens_mask),
            "offset_mapping": ("offsets", return_offsets_mapping),
        }
        result = Encodings()
        for name, (attribute, is_wanted) in wanted.items():
            if name in self.model_input_names if is_wanted is None else is_wanted:
                result[name] = [getattr(encoding, attribute) for encoding in encodings]
        if return_overflowing_tokens:
            result["overflow_to_sample_mapping"] = [row for row, of_row in enumerate(parts) for _ in of_row]
        elif is_single:
            result = Encodings({name: values[0] for name, values in result.items()})
        result.encodings = encodings
        return result

    def pad(self, encoded: Mapping[str, Sequence[Sequence[int]]], *, padding: str, max_length: int) -> Encodings:
        """Pad encoded texts to `max_length` tokens; `padding` is `max_length`."""
        fills = {"input_ids": self.pad_token_id, _TYPES: self.pad_token_type_id}
        padded = Encodings()
        for name, rows in encoded.items():
            missing = [[fills.get(name, 0)] * (max_length - len(row)) for row in rows]
            pairs = zip(rows, missing, strict=True)
            is_left = self.padding_side == "left"
            padded[name] = [[*more, *row] if is_left else [*row, *more] for row, more in pairs]
        return padded

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of an id or of ids."""
        numbers = [int(number) for number in ([ids] if isinstance(ids, int) else ids)]
        text: str = self._tokenizer.decode(numbers, skip_special_tokens=skip_special_tokens)
        if self._cleans_up and not isinstance(self._tokenizer.model, models.BPE):
            for part in _CLEANED:
                text = text.replace(part, part.strip())
        return text

    def batch_decode(self, rows: Any, skip_special_tokens: bool = False) -> list[str]:
        """The text of each row of ids."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The token of an id, or of each of several ids."""
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        return [self._tokenizer.id_to_token(int(number)) for number in ids]

    def _set_truncation(self, truncation: bool | str, max_length: int | None, stride: int) -> None:
        longest = self.model_max_length if max_length is None else max_length
        if truncation is False or longest >= _UNLIMITED:
            self._tokenizer.no_truncation()
            return
        strategy = "longest_first" if truncation is True else truncation
        self._tokenizer.enable_truncation(longest, stride=stride, strategy=strategy, direction=self._truncation_side)

    def _add_ends(self, bos: bool, eos: bool) -> None:
        """Put tokens that begin and end a text around it, as `add_bos_token` and `add_eos_token` of a folder say."""
        first, last = (
            getattr(self, f"{kind}_token") if is_added else None for kind, is_added in (("bos", bos), ("eos", eos))
        )
        single, second = (
            " ".join(f"{part}:{number}" for part in (first, text, last) if part is not None)
            for number, text in enumerate(("$A", "$B"))
        )
        special = [(token, self._tokenizer.token_to_id(token)) for token in (first, last) if token is not None]
        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} {second}", special_tokens=special
        )


def _read(file: Path) -> dict[str, Any]:
    """The object of a JSON file; empty without the file."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content


def _added(token: Any) -> AddedToken | None:
    """A special token as the files of a folder describe it: its text, or an object with its properties."""
    if not isinstance(token, Mapping):
        return None if token is None else AddedToken(str(token), special=True, normalized=False)
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(token["content"], **{name: token[name] for name in names if name in token})


def _values(tokens: Any) -> list[Any]:
    """Further special tokens, which may be listed or named."""
    return list(tokens.values() if isinstance(tokens, Mapping) else tokens)


def _number(entry: tuple[str, Any]) -> int:
    return int(entry[0])
