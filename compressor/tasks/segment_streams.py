"""Plain text for models with segment memory: segments that follow each other, read side by side in streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from compressor.errors import InputError
from compressor.model_folder import ModelFolder
from compressor.models.segments import Memories
from compressor.tasks.base import DataRequest, Task
from compressor.tasks.causal_lm import CausalLM, summed_loss
from compressor.tasks.metrics import bits, perplexity

Reader = Callable[[Tensor], Tensor]
"""The next segment of every stream, ids `[streams, segment]`, to logits; remembers the segments before by itself."""

FILLER = -1
"""The number of no row: its targets do not count."""

_UNKNOWN = 0.5
"""Share of unknown tokens from which on a text is none of the tokenizer's."""


class Streams(CausalLM):
    """Perplexity of a text read from its first segment to its last, with what the model remembers carried on.

    A row is `max_length` + 1 tokens: the inputs of a segment, and each one's target, the token after it. The last
    target is the first input of the next row, so every token of a text but its first is predicted once.

    Args:
        folder: its tokenizer makes the tokens.
        request: the text column and the length of a segment.
        metric: `perplexity`.

    Raises:
        InputError: the tokenizer has another number of tokens than the model, or memory leaves no room for a segment.
    """

    in_order = True
    label_name = "shift_labels"
    shortest = 1
    _unit = "tokens"
    _larger = ", or train a model that knows more words (--vocabulary)"

    def __init__(self, folder: ModelFolder, request: DataRequest, metric: str) -> None:
        super().__init__(folder, request, metric)
        config = folder.config
        if len(self._tokenizer) != config.vocab_size:
            raise InputError(
                f"{folder.path}: the tokenizer has {len(self._tokenizer)} tokens, the model {config.vocab_size}; save"
                " the tokenizer that the model was trained with there"
            )
        room = config.max_position_embeddings - config.memory_length
        if room < 1:
            raise InputError(
                f"{folder.path}: a memory of {config.memory_length} leaves no room for a segment in"
                f" {config.max_position_embeddings} positions; raise max_position_embeddings in config.json"
            )
        self._alone = _IndependentSegments(folder, request, self)
        self._path, self._block = folder.path, min(self._block, room)
        if self._block < request.max_length:
            self.notes = (
                f"segments are of {self._block} tokens, not the {request.max_length} of --max-length: a memory of"
                f" {config.memory_length} leaves no more room in {config.max_position_embeddings} positions",
            )

    @property
    def chooser(self) -> Task:
        """Segments as rows that stand alone, without memory: subsets of heads are searched among in any order."""
        return self._alone

    def collate(self, examples: Sequence[Mapping[str, Any] | None]) -> dict[str, Tensor]:
        """`input_ids` and `shift_labels`, `[streams, segment]`; what a shorter row or a filler (None) lacks is -100."""
        rows = [[] if example is None else list(example["input_ids"]) for example in examples]
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

    def _check(self, texts: Sequence[str], ids: np.ndarray, source: str) -> None:
        share = self._unknown(texts, ids)
        if share > _UNKNOWN:
            raise InputError(
                f"{source}: {share:.0%} of its {self._unit} are unknown to the tokenizer of {self._path}; give a text"
                f" like the one that it was made from{self._larger}"
            )

    def _unknown(self, texts: Sequence[str], ids: np.ndarray) -> float:
        """Share of a text that the tokenizer does not know."""
        unknown = self._tokenizer.unk_token_id
        return 0.0 if unknown is None or not len(ids) else float((ids == unknown).mean())

    def _cut(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        starts = np.arange(0, max(0, tokens - 1), self._block)
        return starts, np.minimum(starts + self._block + 1, tokens)


class CharacterStreams(Streams):
    """The same where every token is a character: bits per character, or perplexity."""

    metrics: tuple[str, ...] = ("bits-per-character", "perplexity")
    _unit = "characters"
    _larger = ""

    def _unknown(self, texts: Sequence[str], ids: np.ndarray) -> float:
        # Tokenizers of letters write a space for what they do not know, and may have no unknown token.
        given = sum(len(word) for text in texts for word in text.split())
        unknown = self._tokenizer.unk_token_id
        blank = [*self._ids([" "])[0], *([] if unknown is None else [unknown])]
        known = len(ids) - int(np.isin(ids, blank).sum())
        return max(0.0, 1 - known / given) if given else 0.0

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Where two spaces are one token, those of a chunk's end and the next one's beginning are, too."""
        (space,) = self._ids(["  "])
        twice = [before[-1:].tolist() == part[:1].tolist() == space for before, part in itertools.pairwise(parts)]
        return super()._joined([part[int(cut) :] for part, cut in zip(parts, [False, *twice], strict=False)])

    def score(self, statistics: np.ndarray) -> float:
        """The metric over rows of (loss, tokens)."""
        measure = bits if self.metric == "bits-per-character" else perplexity
        return measure(statistics[:, 0], statistics[:, 1])


class _IndependentSegments(CausalLM):
    """Rows of `Streams` as `CausalLM` reads them: the same targets, each from its own row."""

    shortest = 1

    def __init__(self, folder: ModelFolder, request: DataRequest, streams: Streams) -> None:
        super().__init__(folder, request, streams.metric)
        self._streams = streams

    def score(self, statistics: np.ndarray) -> float:
        return self._streams.score(statistics)


def remembers(config: PretrainedConfig) -> bool:
    """Whether a model reads segments with a memory of those before."""
    return hasattr(config, "memory_length")


def streams_of(folder: ModelFolder) -> type[Streams]:
    """By what its tokens are, characters or words."""
    tokenizer = folder.processor
    plain = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    return CharacterStreams if all(len(token) == 1 for token in plain) else Streams


def assign_streams(rows: int, streams: int, *, whole: bool) -> np.ndarray:
    """Row numbers `[segments, streams]`: column s is a stretch of the text, row t the t-th segment of every stream.

    Args:
        rows: segments of the text.
        streams: streams side by side.
        whole: the text to its end, streams that end early filled up with `FILLER`; else as much as fills all streams.

    Raises:
        InputError: there are fewer segments than streams to fill.
    """
    if not whole and rows < streams:
        raise InputError(
            f"{streams} streams side by side need as many segments, the text has {rows}; lower --batch-size, shorten"
            " the segments, or give more text"
        )
    length = -(-rows // streams) if whole else rows // streams
    numbers = np.arange(length * streams)
    return np.where(numbers < rows, numbers, FILLER).reshape(streams, length).T


def reader(model: PreTrainedModel) -> Reader:
    """Reads streams with a PyTorch model, which is in evaluation mode."""
    memories: Memories | None = None

    def forward(ids: Tensor) -> Tensor:
        nonlocal memories
        with torch.no_grad():
            out = model(input_ids=ids.to(model.device), memories=memories)
        memories = out.memories
        return cast(Tensor, out.logits)

    return forward


def read(
    task: Streams, examples: Dataset, forward: Reader, streams: int = 32, progress: Callable[[int], None] | None = None
) -> np.ndarray:
    """Statistics of every row, `[examples, 2]`, the text read in order with memory carried.

    Args:
        task: collates and scores.
        examples: encoded rows, as they follow each other.
        forward: runs the model, which has read nothing yet, on one segment of every stream.
        streams: streams side by side; more are faster, and each begins without memory.
        progress: is told the number of rows done after each segment.
    """
    found = np.zeros((len(examples), 2))
    for rows in assign_streams(len(examples), min(streams, len(examples)), whole=True):
        there = rows != FILLER
        batch = task.collate([examples[int(row)] if row != FILLER else None for row in rows])
        logits = forward(batch["input_ids"])
        found[rows[there]] = summed_loss(logits, batch["shift_labels"].to(logits.device)).cpu().numpy()[there]
        if progress is not None:
            progress(int(there.sum()))
    return found
