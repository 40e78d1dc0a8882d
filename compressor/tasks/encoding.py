"""Texts become tokens and padded batches, and text again; and the base class of tasks that read texts with a label."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasets import Dataset

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, RowError
from compressor.graph.signature import HasSignature
from compressor.model_folder import ModelFolder
from compressor.model_folder.feeds import ordinary_ids, vocabulary_size
from compressor.model_folder.text_limits import takes_token_types, token_limit
from compressor.model_folder.tokenizer_file import Encodings
from compressor.results import Note, NoteCode
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Batch, Vocabulary
from compressor.tasks.columns import TextColumns, empty_text_notes
from compressor.tasks.labelled_rows import LabelledRows
from compressor.tasks.metrics import Metric
from compressor.tasks.row_store import RowStore

_TYPES = "token_type_ids"
_CHUNK_ROWS = 2000  # rows that are encoded at once
_TEXTS = 2  # maximum number of texts of an example that are shown
_SHOWN = 120  # maximum number of characters of a text that are shown
_FRAMES = ("bos_token_id", "cls_token_id", "eos_token_id", "pad_token_id", "sep_token_id")
"""Attributes of a tokenizer with the tokens that separate texts; a mask is a part of its text."""


class TextTokenizer:
    """The tokenizer of a folder: it truncates texts to a maximum length, and pads batches as the model reads them.

    Args:
        texts: number of texts of an example, one or two.
        least: number of tokens, except special tokens, that must fit in an example; None: a token of each text.

    Attributes:
        longest: maximum number of tokens of an example: the smallest limit of recipe, model and tokenizer.
        room: maximum number of tokens of an example, without special tokens.
        takes_types: whether examples have token types.

    Raises:
        InputError: fewer tokens than `least` fit.
    """

    def __init__(self, folder: ModelFolder, request: RowsConfig, *, texts: int = 1, least: int | None = None) -> None:
        self._folder, self._tokenizer = folder, folder.processor
        limits = (request.max_length, token_limit(folder.model), self._tokenizer.model_max_length)
        self.longest = int(min(limit for limit in limits if limit))
        special = self._tokenizer.num_special_tokens_to_add(pair=texts == 2)
        self.room = self.longest - special
        if self.room < (least or texts):
            text = (
                f"{folder.path}: {self.longest} tokens leave no room for text besides {special} special tokens; raise"
                " --max-length"
            )
            details = {"field": "max_length", "value": self.longest, "minimum": special + (least or texts)}
            raise InputError(text, code=ErrorCode.OUT_OF_RANGE, **details)
        self.takes_types = takes_token_types(folder.model, self._tokenizer)
        # A graph has no default for an input that its tokenizer does not return.
        self._needs_types = isinstance(folder.model, HasSignature) and _TYPES in folder.model.input_specs
        ids = (folder.config.get_text_config().pad_token_id, self._tokenizer.pad_token_id)
        self._padding = next((number for number in ids if isinstance(number, int) and number >= 0), 0)  # it is masked

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, without that of unknown words."""
        return frozenset(self._tokenizer.all_special_ids) - {self._tokenizer.unk_token_id}

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens."""
        size = vocabulary_size(self._folder.config, self._folder.model)
        return Vocabulary(self.special_ids, ordinary_ids(self._folder.config, size, self._tokenizer))

    def __call__(self, *texts: Sequence[Any], **options: Any) -> Encodings:
        """Tokenize the first texts of all examples, and the second ones; `options` are for the tokenizer."""
        if texts and not texts[0]:
            return Encodings({"input_ids": []})
        usual = {"truncation": True, "max_length": self.longest, "return_token_type_ids": self.takes_types}
        with quiet_transformers():
            encoded: Encodings = self._tokenizer(*texts, **usual | options)
        return encoded

    def collate(
        self, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None, *, left: bool = False
    ) -> Batch:
        """Token ids, attention mask and, if the model reads them, token types, each `[examples, longest]`.

        Without `types`, all are zero. Padding comes last, or first with `left`.
        """
        padded = pad(ids, self._padding, left=left)
        batch = {"input_ids": padded, "attention_mask": pad([[1] * len(row) for row in ids], 0, left=left)}
        if types is not None and self.takes_types:
            batch[_TYPES] = pad(types, self._tokenizer.pad_token_type_id, left=left)
        elif self.takes_types or self._needs_types:
            batch[_TYPES] = np.zeros_like(padded)
        return batch

    def cut_notes(self, source: str, cut: int, total: int, kind: str = "rows") -> tuple[Note, ...]:
        """A note on the `cut` of all `total` rows, or texts, that are truncated, if there are any."""
        text = (
            f"{source}: {cut} of {total} {kind} are longer than {self.longest} tokens and are truncated (--max-length)"
        )
        return (Note(text=text, code=NoteCode.ROWS_CUT),) if cut else ()


def count_cut(encoded: Encodings) -> int:
    """Number of examples that the tokenizer truncated; 0 for a tokenizer that does not report it (slow ones)."""
    return sum(bool(example.overflowing) for example in encoded.encodings or ())


def encode_chunks(
    rows: Dataset, encode: Callable[[Dataset, int], tuple[pa.Table | dict[str, Any], int]]
) -> tuple[Dataset, int]:
    """The examples of rows that are encoded chunk by chunk, memory-mapped if they are many, and the sum of the counts.

    Args:
        rows: the rows; without any, one empty chunk is encoded.
        encode: returns columns of examples and a count, such as that of truncated texts, from consecutive rows and the
            number of rows before them.
    """
    store, total = RowStore(), 0
    for start in range(0, max(1, len(rows)), _CHUNK_ROWS):
        columns, count = encode(rows.select(range(start, min(start + _CHUNK_ROWS, len(rows)))), start)
        store.add(columns if isinstance(columns, pa.Table) else Dataset.from_dict(columns).data.table)
        total += count
    return store.finish(), total


def require_fast_tokenizer(folder: ModelFolder, purpose: str) -> None:
    """Raise InputError unless the tokenizer of a folder reports the purpose: e.g. `which characters a token is`."""
    tokenizer = folder.processor
    if not getattr(tokenizer, "is_fast", False):
        text = (
            f"{folder.path}: its tokenizer ({type(tokenizer).__name__}) does not report {purpose}; save the fast"
            " tokenizer there (tokenizer.json)"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=folder.path, tokenizer=type(tokenizer).__name__)


def require_tokens(ids: Sequence[Sequence[int]], names: Sequence[str], start: int, source: str) -> list[int]:
    """The number of tokens of rows after the first `start`; raise RowError for a row without tokens in its columns."""
    lengths = list(map(len, ids))
    if 0 in lengths:
        problem = f"no text in {' and '.join(map(repr, names))}; fill it or remove the row"
        raise RowError.of(source, start + lengths.index(0) + 1, problem, column=",".join(names))
    return lengths


def pad(rows: Sequence[Any], fill: int, *, left: bool = False) -> np.ndarray:
    """Lists of integers, padded with `fill` on the right or left, `[lists, longest]` or `[lists, longest, k]`."""
    arrays = [np.asarray(row, np.int64) for row in rows]
    longest = max(map(len, arrays))
    padded = np.full((len(arrays), longest, *arrays[0].shape[1:]), fill, np.int64)
    for values, array in zip(padded, arrays, strict=True):
        values[longest - len(array) if left else 0 :][: len(array)] = array
    return padded


def group_means(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The mean of each group of consecutive values, `[groups]`, from values `[sum of counts]`."""
    return np.array([group.mean() for group in np.split(values, np.cumsum(counts)[:-1])])


class LabelledTexts(LabelledRows):
    """Base class of tasks whose rows have one or two texts and a label.

    Raises:
        InputError: the maximum length leaves no room for text.
    """

    text_columns: ClassVar[TextColumns] = TextColumns()

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        self._texts = TextTokenizer(folder, request, texts=2)
        # The tokenizer puts padding first, and the model reads the last position (XLNet).
        reads_last = getattr(folder.config, "summary_type", None) == "last"
        self._pads_left = reads_last and folder.processor.padding_side == "left"

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self._texts.vocabulary

    def usual_texts(self, rows: Dataset) -> tuple[str, ...]:
        return self.text_columns.find_usual(rows)

    def encode_with(self, rows: Dataset, labels: Iterable[Any], source: str) -> Dataset:
        """The tokens, the label and the `length` of every row; raise InputError for a row without a token."""
        names = self.text_columns.find(rows, self._request.text_columns, source)
        remaining = iter(labels)

        def encode(chunk: Dataset, start: int) -> tuple[dict[str, Any], int]:
            columns, cut = self._tokenize([list(chunk[name]) for name in names])
            lengths = require_tokens(columns["input_ids"], names, start, source)
            return {**columns, "length": lengths, "labels": list(itertools.islice(remaining, len(chunk)))}, cut

        encoded, cut = encode_chunks(rows, encode)
        cut_notes = self._texts.cut_notes(source, cut, len(rows))
        self.notes = (*self.notes, *empty_text_notes(rows, names, source), *cut_notes)
        return encoded

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Token ids, mask and token types `[batch, longest]`, and `labels` `[batch, ...]`.

        Texts are padded on the right, or on the left where `_pads_left` says so.
        """
        ids = [example["input_ids"] for example in examples]
        types = [example["token_type_ids"] for example in examples] if self._texts.takes_types else None
        labels = np.array([example["labels"] for example in examples], self.label_type)
        return {**self._texts.collate(ids, types, left=self._pads_left), "labels": labels}

    def _tokenize(self, texts: Sequence[list[str]]) -> tuple[Encodings, int]:
        encoded = self._texts(*texts, return_attention_mask=True)
        return encoded, count_cut(encoded)


def row_texts(example: Mapping[str, Any], tokenizer: Any) -> tuple[str, ...]:
    """The first texts of an example, e.g. question and context, or its file; empty without either.

    `input_ids` may be lists of texts or windows; the tokenizer, which may be None, decodes them.
    """
    if file := example.get("file"):
        return (shorten(file),)
    ids = example.get("input_ids")
    if not hasattr(tokenizer, "decode") or not ids:
        return ()
    frames = {getattr(tokenizer, name, None) for name in _FRAMES}
    parts = [ids] if isinstance(ids[0], int) else ids
    runs = itertools.chain.from_iterable(runs_between(part, frames) for part in parts)
    return tuple(shorten(tokenizer.decode(run)) for run in itertools.islice(runs, _TEXTS))


def runs_between(ids: Sequence[int], frames: Collection[int | None]) -> list[list[int]]:
    """The runs of tokens between special ones (`frames`), each a text of an example."""
    return [list(run) for is_frame, run in itertools.groupby(ids, frames.__contains__) if not is_frame]


def shorten(text: str) -> str:
    """A text on a single line, truncated after 120 characters."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"


def shorten_both(first: str, second: str) -> tuple[str, str]:
    """Two texts on a line each, truncated so that both show where they begin to differ."""
    texts = [" ".join(text.split()) for text in (first, second)]
    pairs = zip(*texts, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    start = common - _SHOWN // 2
    if start > 0 and texts[0] != texts[1]:
        texts = [f"…{text[start:]}" for text in texts]
    return shorten(texts[0]), shorten(texts[1])
