"""Language modelling: predict the next token of plain text, in segments or, with a memory, in streams."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasets import Dataset

from compressor.answers import IGNORED
from compressor.config.sections import RowsConfig
from compressor.config.values import PLAIN_TEXT
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.text_limits import token_limit
from compressor.progress import ProgressCallback, ignore_progress
from compressor.results import Note, NoteCode
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Batch, Task
from compressor.tasks.columns import TextColumns
from compressor.tasks.encoding import pad
from compressor.tasks.metrics import Metric, bits_per_token, perplexity, summed_losses

_TEXTS_PER_CALL = 64  # number of texts per call of the tokenizer

PERPLEXITY = Metric("perplexity", perplexity, higher_is_better=False)


class CausalLM(Task):
    """Perplexity over segments of the concatenated rows, which have the maximum length.

    Lines of plain text files are joined by line ends; rows of other files and data sets are joined by the end token, or
    by line ends if the tokenizer has none. The first token of a segment is not predicted. The last, shorter segment is
    kept if a token can be predicted in it.

    Raises:
        InputError: a segment is too short to predict a token.
    """

    name = "causal-lm"
    generates = True
    metrics: ClassVar[tuple[Metric, ...]] = (PERPLEXITY,)
    text_columns: ClassVar[TextColumns] = TextColumns(counts=(1,))
    shortest: ClassVar[int] = 2
    """Minimum tokens of a segment in which a token can be predicted."""
    joined_rows: ClassVar[int] = 1000
    _overlap: ClassVar[int] = 0

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        self._tokenizer = folder.processor
        self._columns = request.text_columns
        limit = token_limit(folder.model)
        self._segment_length = min(request.max_length, limit) if limit else request.max_length
        if self._segment_length < self.shortest:
            text = f"{folder.path}: no token can be predicted in segments of {self._segment_length}; raise --max-length"
            details = {"field": "max_length", "value": self._segment_length, "minimum": self.shortest}
            raise InputError(text, code=ErrorCode.OUT_OF_RANGE, **details)

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode the text as segments: columns `input_ids` and `length`.

        Raises:
            InputError: the column of text is missing, or no token can be predicted in the text.
        """
        (name,) = self.text_columns.find(rows, self._columns, source)
        texts = rows[name][:]
        ids = self.token_stream(texts, lines=rows.info.builder_name == PLAIN_TEXT)
        self._check_vocabulary(texts, ids, source)
        starts = np.arange(0, max(0, len(ids) - 1), self._segment_length)
        ends = np.minimum(starts + self._segment_length + self._overlap, len(ids))
        if not len(starts):
            text = f"{source}: no token can be predicted in {len(ids)} token(s); give more text"
            raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, tokens=len(ids))
        # Examples are slices of the ids, built without Python lists.
        offsets = pa.array(np.concatenate([[0], np.cumsum(ends - starts)]), pa.int32())
        flat = pa.array(np.concatenate([ids[start:end] for start, end in zip(starts, ends, strict=True)]))
        slices = pa.ListArray.from_arrays(offsets, flat)
        return Dataset(pa.table({"input_ids": slices, "length": pa.array(ends - starts)}))

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Segments `[batch, segment]` with their mask; `labels` are the ids, which the model shifts.

        Padding on the right is masked, and has no labels (-100).
        """
        ids, labels = (pad([example["input_ids"] for example in examples], fill) for fill in (0, IGNORED))
        return {"input_ids": ids, "attention_mask": (labels != IGNORED).astype(np.int64), "labels": labels}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Summed loss in nats and predicted tokens of each segment, from logits `[batch, segment, vocabulary]`."""
        return summed_losses(logits[:, :-1], labels[:, 1:])

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """The token that is predicted after each token except padding."""
        tokens = logits.argmax(-1)
        return tokens[batch["attention_mask"] != 0] if "attention_mask" in batch else tokens

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        return [f"{self.metric} {self.score(row[None]):.4g}" for row in self.per_example(logits, labels)]

    def token_stream(self, texts: Sequence[str], *, lines: bool) -> np.ndarray:
        """Tokenize texts, or lines of a text, as one sequence of ids `[tokens]`; the end token separates texts.

        It is int32: 4 bytes per token, where a Python list needs 36.
        """
        end = None if lines else self._tokenizer.eos_token_id
        if end is None:
            size = self.joined_rows
            chunks = (texts[start : start + size] for start in range(0, len(texts), size))
            texts = ["".join(f"{line}\n" for line in chunk) for chunk in chunks]
        ends = [] if end is None else [end]
        groups = (texts[start : start + _TEXTS_PER_CALL] for start in range(0, len(texts), _TEXTS_PER_CALL))
        return self._join_chunks([np.array([*row, *ends], np.int32) for group in groups for row in self._ids(group)])

    def _check_vocabulary(self, texts: Sequence[str], ids: np.ndarray, source: str) -> None:
        """Raise InputError if the tokenizer does not know the text; this class accepts any text."""

    def _join_chunks(self, chunks: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(chunks) if chunks else np.empty(0, np.int32)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        with quiet_transformers():
            return list(self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"])


SegmentForward = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Computes `summed_losses` from ids and targets of the next segment of every stream, `[streams, segment]` each; keeps
memories between calls."""

FILLER = -1
"""Number of a missing segment, whose targets are ignored."""

_MAX_UNKNOWN = 0.5  # maximum share of unknown tokens in a text


class Streams(CausalLM):
    """Perplexity of a text that is read from the first segment to the last, with a memory of earlier segments.

    An example has `max_length` + 1 tokens: the inputs of a segment, and the token after it, which is also the first
    input of the next segment. Every token of a text except the first is predicted once.

    Raises:
        InputError: tokenizer and model differ in their numbers of tokens, or the memory leaves no room for a segment.
    """

    in_order = True
    reads_streams = True
    generates = False
    label_name = "shift_labels"
    shortest = 1
    _overlap = 1
    _unit: ClassVar[str] = "tokens"
    _remedy: ClassVar[str] = ", or train a model with a larger vocabulary (--vocabulary)"

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        config = folder.config
        if len(self._tokenizer) != config.vocab_size:
            text = (
                f"{folder.path}: the tokenizer has {len(self._tokenizer)} tokens, the model {config.vocab_size}; save"
                " the tokenizer with which the model was trained in the folder"
            )
            details = {"path": folder.path, "tokens": len(self._tokenizer), "vocab_size": config.vocab_size}
            raise InputError(text, code=ErrorCode.FILE_MISMATCH, **details)
        room = config.max_position_embeddings - config.memory_length
        if room < 1:
            text = (
                f"{folder.path}: a memory of {config.memory_length} leaves no room for a segment in"
                f" {config.max_position_embeddings} positions; raise max_position_embeddings in config.json"
            )
            details = {"value": config.max_position_embeddings, "minimum": config.memory_length + 1}
            details |= {"path": folder.path, "field": "max_position_embeddings"}
            raise InputError(text, code=ErrorCode.OUT_OF_RANGE, **details)
        self._independent = IndependentSegments(folder, request, metric)
        self._path, self._segment_length = folder.path, min(self._segment_length, room)
        if self._segment_length < request.max_length:
            text = (
                f"segments have {self._segment_length} tokens instead of the {request.max_length} of --max-length: a"
                f" memory of {config.memory_length} leaves no more room in {config.max_position_embeddings} positions"
            )
            self.notes = (Note(text=text, code=NoteCode.SEGMENT_SHORTENED),)

    @classmethod
    def accepts(cls, folder: ModelFolder) -> bool:
        return hasattr(folder.config, "memory_length")

    @property
    def chooser(self) -> Task:
        """Independent segments without memory, because a search evaluates them in any order."""
        return self._independent

    def collate(self, examples: Sequence[Mapping[str, Any] | None]) -> Batch:
        """`input_ids` and `shift_labels`, `[streams, segment]`, of the segment of each stream; None or empty if
        missing.

        -100 pads the targets of short and missing segments.
        """
        rows = [list(example["input_ids"]) if example else [] for example in examples]
        length = max(2, *map(len, rows)) - 1
        parts = {"input_ids": (0, [row[:-1] for row in rows]), "shift_labels": (-100, [row[1:] for row in rows])}
        return {
            name: np.array([[*row, *[fill] * (length - len(row))] for row in padded], np.int64)
            for name, (fill, padded) in parts.items()
        }

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Summed loss in nats and predicted tokens of each segment, from logits `[streams, segment, vocabulary]`."""
        return summed_losses(logits, labels)

    def _check_vocabulary(self, texts: Sequence[str], ids: np.ndarray, source: str) -> None:
        share = self._unknown_share(texts, ids)
        if share > _MAX_UNKNOWN:
            text = (
                f"{source}: {share:.0%} of its {self._unit} are unknown to the tokenizer of {self._path}; give text"
                f" like that from which the tokenizer was built{self._remedy}"
            )
            raise InputError(text, code=ErrorCode.FILE_MISMATCH, path=self._path, share=share, unit=self._unit)

    def _unknown_share(self, texts: Sequence[str], ids: np.ndarray) -> float:
        unknown = self._tokenizer.unk_token_id
        return 0.0 if unknown is None or not len(ids) else float((ids == unknown).mean())


class CharacterStreams(Streams):
    """Streams whose tokens are characters: bits per character, or perplexity."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        # 1% of a perplexity.
        Metric("bits-per-character", bits_per_token, higher_is_better=False, point=math.log2(1.01)),
        PERPLEXITY,
    )
    _unit = "characters"
    _remedy = ""

    @classmethod
    def accepts(cls, folder: ModelFolder) -> bool:
        """Whether the model has segment memory, and all tokens except special ones are single characters."""
        if not super().accepts(folder):
            return False
        tokenizer = folder.processor
        return all(len(token) == 1 for token in set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens))

    def _unknown_share(self, texts: Sequence[str], ids: np.ndarray) -> float:
        # A tokenizer of letters may encode an unknown character as a space instead of an unknown token.
        characters = sum(len(word) for text in texts for word in text.split())
        unknown = self._tokenizer.unk_token_id
        blank = [*self._ids([" "])[0], *([] if unknown is None else [unknown])]
        known = len(ids) - int(np.isin(ids, blank).sum())
        return max(0.0, 1 - known / characters) if characters else 0.0

    def _join_chunks(self, chunks: Sequence[np.ndarray]) -> np.ndarray:
        """Concatenate chunks, and merge spaces at their border if the tokenizer merges two spaces."""
        (space,) = self._ids(["  "])
        repeated = [left[-1:].tolist() == right[:1].tolist() == space for left, right in itertools.pairwise(chunks)]
        skips = [False, *repeated]
        return super()._join_chunks([chunk[int(skip) :] for chunk, skip in zip(chunks, skips, strict=False)])


class IndependentSegments(CausalLM):
    """The segments of `Streams` without memory, as `CausalLM` reads them; the targets are the same."""

    shortest = 1


def assign_streams(rows: int, streams: int, *, whole: bool) -> np.ndarray:
    """Numbers of segments `[segments, streams]`; the segments of each stream are a consecutive part of the text.

    Args:
        whole: cover the whole text, and pad streams that end early with `FILLER`; otherwise drop the last segments,
            which do not fill all streams.

    Raises:
        InputError: there are fewer segments than streams to fill.
    """
    if not whole and rows < streams:
        text = (
            f"{streams} parallel streams need as many segments, the text has {rows}; lower --batch-size, shorten"
            " the segments, or give more text"
        )
        raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, rows=rows, minimum=streams)
    length = -(-rows // streams) if whole else rows // streams
    numbers = np.arange(length * streams)
    return np.where(numbers < rows, numbers, FILLER).reshape(streams, length).T


def read(
    task: Task,
    examples: Dataset,
    forward: SegmentForward,
    streams: int = 32,
    on_progress: ProgressCallback = ignore_progress,
) -> np.ndarray:
    """Statistics of every segment, `[examples, 2]`; the text is read in order, with a memory of earlier segments.

    Args:
        examples: segments in the order of the text.
        forward: runs the model on a segment of every stream; its memory is empty at the start.
        streams: number of parallel streams; more are faster, but each starts without memory.
    """
    losses, done = np.zeros((len(examples), 2)), 0
    for rows in assign_streams(len(examples), min(streams, len(examples)), whole=True):
        present = rows != FILLER
        batch = task.collate([examples[int(row)] if row != FILLER else {} for row in rows])
        losses[rows[present]] = forward(batch["input_ids"], batch["shift_labels"])[present]
        on_progress(done := done + int(present.sum()), len(examples))
    return losses
