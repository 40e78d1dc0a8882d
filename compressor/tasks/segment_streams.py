"""Plain text for models with segment memory, which read consecutive segments in parallel streams."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.models.segments import Memories
from compressor.results import Note, NoteCode
from compressor.tasks.base import Task
from compressor.tasks.causal_lm import PERPLEXITY, CausalLM, summed_loss
from compressor.tasks.metrics import Metric, bits_per_token

SegmentForward = Callable[[Tensor], Tensor]
"""Computes logits from ids of the next segment of every stream, `[streams, segment]`; keeps memories between calls."""

FILLER = -1
"""Number of a missing segment, whose targets are ignored."""

_MAX_UNKNOWN = 0.5
"""Maximum share of unknown tokens in a text."""


class Streams(CausalLM):
    """Perplexity of a text that is read from the first segment to the last, with a memory of earlier segments.

    An example has `max_length` + 1 tokens: the inputs of a segment, and the token after it, which is also the first
    input of the next segment. Every token of a text except the first is predicted once.

    Raises:
        InputError: tokenizer and model differ in their numbers of tokens, or the memory leaves no room for a segment.
    """

    in_order = True
    reads_streams = True
    label_name = "shift_labels"
    shortest = 1
    _unit: ClassVar[str] = "tokens"
    _remedy: ClassVar[str] = ", or train a model with a larger vocabulary (--vocabulary)"

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        config = folder.config
        if len(self._tokenizer) != config.vocab_size:
            raise InputError(
                f"{folder.path}: the tokenizer has {len(self._tokenizer)} tokens, the model {config.vocab_size}; save"
                " the tokenizer with which the model was trained in the folder",
                code=ErrorCode.FILE_MISMATCH,
                path=folder.path,
                tokens=len(self._tokenizer),
                vocab_size=config.vocab_size,
            )
        room = config.max_position_embeddings - config.memory_length
        if room < 1:
            raise InputError(
                f"{folder.path}: a memory of {config.memory_length} leaves no room for a segment in"
                f" {config.max_position_embeddings} positions; raise max_position_embeddings in config.json",
                code=ErrorCode.OUT_OF_RANGE,
                path=folder.path,
                field="max_position_embeddings",
                value=config.max_position_embeddings,
                minimum=config.memory_length + 1,
            )
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
        """Whether the model reads segments with a memory of earlier ones."""
        return hasattr(folder.config, "memory_length")

    @property
    def chooser(self) -> Task:
        """Independent segments without memory, because a search evaluates them in any order."""
        return self._independent

    def collate(self, examples: Sequence[Mapping[str, Any] | None]) -> dict[str, Tensor]:
        """`input_ids` and `shift_labels`, `[streams, segment]`; -100 pads targets of short and missing segments.

        Args:
            examples: the segment of each stream; None or empty if it is missing.
        """
        rows = [list(example["input_ids"]) if example else [] for example in examples]
        length = max(2, *(len(row) for row in rows))
        ids = torch.zeros(len(rows), length - 1, dtype=torch.int64)
        targets = torch.full_like(ids, -100)
        for number, row in enumerate(rows):
            if row:
                ids[number, : len(row) - 1] = torch.tensor(row[:-1])
                targets[number, : len(row) - 1] = torch.tensor(row[1:])
        return {"input_ids": ids, "shift_labels": targets}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Summed loss in nats and predicted tokens of each segment, from logits `[streams, segment, vocabulary]`."""
        return summed_loss(torch.from_numpy(logits), torch.from_numpy(labels)).numpy()

    def _check_vocabulary(self, texts: Sequence[str], ids: np.ndarray, source: str) -> None:
        share = self._unknown_share(texts, ids)
        if share > _MAX_UNKNOWN:
            text = (
                f"{source}: {share:.0%} of its {self._unit} are unknown to the tokenizer of {self._path}; give text"
                f" like that from which the tokenizer was built{self._remedy}"
            )
            raise InputError(text, code=ErrorCode.FILE_MISMATCH, path=self._path, share=share, unit=self._unit)

    def _unknown_share(self, texts: Sequence[str], ids: np.ndarray) -> float:
        """Share of a text that the tokenizer does not know."""
        unknown = self._tokenizer.unk_token_id
        return 0.0 if unknown is None or not len(ids) else float((ids == unknown).mean())

    def _segment_bounds(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        starts = np.arange(0, max(0, tokens - 1), self._segment_length)
        return starts, np.minimum(starts + self._segment_length + 1, tokens)


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
        rows: number of segments of the text.
        streams: number of parallel streams.
        whole: cover the whole text, and pad streams that end early with `FILLER`; otherwise drop the last segments,
            which do not fill all streams.

    Raises:
        InputError: there are fewer segments than streams to fill.
    """
    if not whole and rows < streams:
        raise InputError(
            f"{streams} parallel streams need as many segments, the text has {rows}; lower --batch-size, shorten"
            " the segments, or give more text",
            code=ErrorCode.TOO_FEW_ROWS,
            rows=rows,
            minimum=streams,
        )
    length = -(-rows // streams) if whole else rows // streams
    numbers = np.arange(length * streams)
    return np.where(numbers < rows, numbers, FILLER).reshape(streams, length).T


def reader(model: PreTrainedModel) -> SegmentForward:
    """A `SegmentForward` of a PyTorch model in evaluation mode; its memory is empty at the start."""
    memories: Memories | None = None

    def forward(ids: Tensor) -> Tensor:
        nonlocal memories
        with torch.no_grad():
            outputs = model(input_ids=ids.to(model.device), memories=memories)
        memories = outputs.memories
        return cast(Tensor, outputs.logits)

    return forward


def read(
    task: Task,
    examples: Dataset,
    forward: SegmentForward,
    streams: int = 32,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Statistics of every segment, `[examples, 2]`; the text is read in order, with a memory of earlier segments.

    Args:
        task: a task that reads streams, which collates segments.
        examples: segments in the order of the text.
        forward: runs the model on a segment of every stream; its memory is empty at the start.
        streams: number of parallel streams; more are faster, but each starts without memory.
        progress: called after each batch with its number of segments.
    """
    losses = np.zeros((len(examples), 2))
    for rows in assign_streams(len(examples), min(streams, len(examples)), whole=True):
        present = rows != FILLER
        batch = task.collate([examples[int(row)] if row != FILLER else {} for row in rows])
        logits = forward(batch["input_ids"])
        losses[rows[present]] = summed_loss(logits, batch["shift_labels"].to(logits.device)).cpu().numpy()[present]
        if progress is not None:
            progress(int(present.sum()))
    return losses
