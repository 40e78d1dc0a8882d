"""Texts as tokens and padded batches, and back; and the base class of tasks that read texts with a label."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, RowError
from compressor.model_folder import ModelFolder
from compressor.model_folder.example_inputs import takes_token_types, token_limit
from compressor.results import Note, NoteCode
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.columns import TextColumns, empty_text_notes
from compressor.tasks.labelled_rows import LabelledRows
from compressor.tasks.metrics import Metric
from compressor.tasks.row_store import RowStore

_CHUNK_ROWS = 2000
"""Rows that are encoded at once."""
_TEXTS = 2
"""Maximum number of texts of a row that are shown."""
_FRAMES = ("bos_token_id", "cls_token_id", "eos_token_id", "pad_token_id", "sep_token_id")
"""Attributes of a tokenizer with the tokens that separate texts; a mask is a part of its text."""


def longest_row(folder: ModelFolder, request: RowsConfig) -> int:
    """Number of tokens to which rows are truncated: the smallest limit of recipe, model and tokenizer."""
    limits = (request.max_length, token_limit(folder.model), folder.processor.model_max_length)
    return int(min(limit for limit in limits if limit))


def row_length(folder: ModelFolder, request: RowsConfig, *, texts: int) -> int:
    """Number of tokens to which rows are truncated, with room for a token of each text beside the special tokens.

    Args:
        folder: its model and tokenizer limit the length.
        request: the maximum row length.
        texts: number of texts in a row.

    Raises:
        InputError: there is no such room.
    """
    longest, special = longest_row(folder, request), folder.processor.num_special_tokens_to_add(pair=texts == 2)
    if longest < special + texts:
        raise InputError(
            f"{folder.path}: rows of {longest} tokens leave no room for text beside {special} special tokens;"
            " raise --max-length",
            code=ErrorCode.OUT_OF_RANGE,
            field="max_length",
            value=longest,
            minimum=special + texts,
        )
    return longest


def require_fast_tokenizer(folder: ModelFolder, purpose: str) -> None:
    """Raise InputError unless the tokenizer reports where in a text its tokens are.

    Args:
        folder: its tokenizer is checked.
        purpose: what is needed of it, for the message: `which characters a token is`.
    """
    tokenizer = folder.processor
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"{folder.path}: its tokenizer ({type(tokenizer).__name__}) does not report {purpose}; save the fast"
            " tokenizer there (tokenizer.json)",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=folder.path,
            tokenizer=type(tokenizer).__name__,
        )


def padding_id(folder: ModelFolder) -> int:
    """The token that rows are padded with: that of the model, else that of the tokenizer, else 0. It is masked."""
    ids = (folder.config.get_text_config().pad_token_id, folder.processor.pad_token_id)
    return next((number for number in ids if isinstance(number, int) and number >= 0), 0)


def count_cut(encoded: BatchEncoding) -> int:
    """Number of rows that the tokenizer truncated; 0 for a tokenizer that does not report it (slow ones)."""
    return sum(bool(row.overflowing) for row in encoded.encodings or ())


def cut_notes(source: str, cut: int, total: int, longest: int, kind: str = "rows") -> tuple[Note, ...]:
    """The note on rows that are truncated, if there are any.

    Args:
        source: name of the rows.
        cut: number of rows that are truncated.
        total: number of all.
        longest: number of tokens after which they are.
        kind: what is truncated.
    """
    text = f"{source}: {cut} of {total} {kind} are longer than {longest} tokens and are read up to there (--max-length)"
    return (Note(text=text, code=NoteCode.ROWS_CUT),) if cut else ()


def _pads_left(folder: ModelFolder) -> bool:
    """Whether rows are padded before their first token: the tokenizer does so, and the model reads the last position.

    XLNet is such a model. Others read the first position, or search for the last token.
    """
    reads_last = getattr(folder.config, "summary_type", None) == "last"
    return reads_last and folder.processor.padding_side == "left"


def pad(rows: Sequence[Any], fill: int, *, left: bool = False) -> Tensor:
    """Rows of integers as one tensor, padded with `fill`: `[rows, longest]`, or `[rows, longest, k]`.

    Args:
        rows: the rows.
        fill: the number that they are padded with.
        left: whether they are padded before their first number instead of behind their last.
    """
    tensors = [torch.tensor(row) for row in rows]
    side = "left" if left else "right"
    return pad_sequence(tensors, batch_first=True, padding_value=fill, padding_side=side)


def chunks_of(rows: Dataset) -> Iterator[tuple[int, Dataset]]:
    """Consecutive rows that are encoded at once, with the number of rows before them; one empty chunk without rows."""
    for start in range(0, max(1, len(rows)), _CHUNK_ROWS):
        yield start, rows.select(range(start, min(start + _CHUNK_ROWS, len(rows))))


class LabelledTexts(LabelledRows):
    """Base class of tasks that read one or two texts and one label per row.

    Args:
        folder: its tokenizer encodes the texts.
        request: columns and maximum row length.
        metric: one of `metrics`.

    Raises:
        InputError: the maximum row length leaves no room for text.
    """

    text_columns: ClassVar[TextColumns] = TextColumns()

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        self._tokenizer = folder.processor
        self._longest = row_length(folder, request, texts=2)
        self._with_token_types = takes_token_types(folder.model, self._tokenizer)
        self._padding = padding_id(folder)
        self._pads_left = _pads_left(folder)

    @property
    def special_ids(self) -> frozenset[int] | None:
        """Ids of the special tokens, without that of unknown words."""
        return frozenset(self._tokenizer.all_special_ids) - {self._tokenizer.unk_token_id}

    def usual_texts(self, rows: Dataset) -> tuple[str, ...]:
        """The columns of text that have usual names."""
        return self.text_columns.find_usual(rows)

    def encode_with(self, rows: Dataset, labels: Iterable[Any], source: str) -> Dataset:
        """The tokens of every row, its label and `length`, encoded chunk by chunk; many rows are memory-mapped.

        Raises:
            InputError: a column is missing, or a row has no token.
        """
        names = self.text_columns.find(rows, self._request.text_columns, source)
        remaining = iter(labels)
        store, cut = RowStore(), 0
        for start, chunk in chunks_of(rows):
            columns, cut_rows = self._tokenize([list(chunk[name]) for name in names])
            cut += cut_rows
            lengths = [len(ids) for ids in columns["input_ids"]]
            if 0 in lengths:
                problem = f"no text in {' and '.join(map(repr, names))}; fill it or remove the row"
                raise RowError.of(source, start + lengths.index(0) + 1, problem, column=",".join(names))
            encoded = {**columns, "length": lengths, "labels": list(itertools.islice(remaining, len(chunk)))}
            store.add(Dataset.from_dict(encoded).data.table)
        cut_note = cut_notes(source, cut, len(rows), self._longest)
        self.notes = (*self.notes, *empty_text_notes(rows, names, source), *cut_note)
        return store.finish()

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Token ids, mask and token types `[batch, longest]`, and `labels` `[batch, ...]`.

        Rows are padded on the right, or on the left where `_pads_left` says so.
        """
        fills = {"input_ids": self._padding, "attention_mask": 0}
        if self._with_token_types:
            fills["token_type_ids"] = self._tokenizer.pad_token_type_id
        texts = {
            name: pad([example[name] for example in examples], fill, left=self._pads_left)
            for name, fill in fills.items()
        }
        labels = torch.tensor([example["labels"] for example in examples], dtype=self.label_type)
        return {**texts, "labels": labels}

    def _tokenize(self, texts: Sequence[list[str]]) -> tuple[BatchEncoding, int]:
        """The tokenizer's encoding of rows of one or two texts, and the number of rows that are cut."""
        with quiet_transformers():
            encoded: BatchEncoding = self._tokenizer(
                *texts,
                truncation=True,
                max_length=self._longest,
                return_attention_mask=True,
                return_token_type_ids=self._with_token_types,
            )
        return encoded, count_cut(encoded)


def row_texts(example: Mapping[str, Any], tokenizer: Any) -> tuple[str, ...]:
    """The first texts of an encoded row, e.g. question and context, or its file; empty for rows that have neither.

    Args:
        example: the row, with `file`, or with `input_ids`, which may be a list for each text or window.
        tokenizer: its `decode` converts ids to text; None: there is none.
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
    """The tokens of each text of a row, without the tokens of a frame around them."""
    return [list(run) for is_frame, run in itertools.groupby(ids, frames.__contains__) if not is_frame]


def shorten(text: str, characters: int = 120) -> str:
    """A text on one line, cut after a number of characters."""
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[: characters - 1]}…"


def shorten_both(first: str, second: str, characters: int = 120) -> tuple[str, str]:
    """Two texts on one line each, cut so that the place where they begin to differ is shown."""
    texts = [" ".join(text.split()) for text in (first, second)]
    pairs = zip(*texts, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    start = common - characters // 2
    if start <= 0 or texts[0] == texts[1]:
        return shorten(first, characters), shorten(second, characters)
    return shorten(f"…{texts[0][start:]}", characters), shorten(f"…{texts[1][start:]}", characters)
