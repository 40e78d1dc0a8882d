"""The calls at which a model that generates is timed: a prompt, and a token in the middle of those after it.

A request takes the time of its prompt and of all tokens after it. The time of a token grows linearly with the number of
tokens before it, so the token in the middle takes the mean time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.generation.steps import LOGITS, MASK, TARGET, TEXT, begin, decoded_ids, step
from compressor.results import Phase, Size
from compressor.targets.base import Engine, Feeds
from compressor.targets.caches import ENCODER, Caches, Sessions
from compressor.targets.trial_inputs import trial_feeds
from graph_passes import load

if TYPE_CHECKING:
    from compressor.generation.engine_model import EngineModel

CALLS: tuple[Phase, ...] = ("prompt", "token")
"""Names of the timed calls."""
PROMPT, NEW_TOKENS = 128, 64
"""Tokens of a prompt, and tokens generated after it, by default."""
_EARLIER = "earlier_positions"
"""Feed with the number of tokens that the decoder has read before the call."""


@dataclass(frozen=True)
class Workload:
    """The requests that a model that generates is timed at.

    Attributes:
        sizes: numbers of texts, each with the length of their prompts in tokens.
        new_tokens: number of tokens that a request generates after the prompt.
    """

    sizes: tuple[tuple[int, int], ...]
    new_tokens: int

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """Number of texts and length of a text at each size, when half of the new tokens are generated."""
        return [(batch, prompt + self.new_tokens // 2) for batch, prompt in self.sizes]

    @property
    def requests(self) -> dict[Size, dict[Size, float]]:
        """Size of a request -> how often it makes each call; the call of the prompt computes the first new token."""
        return {
            Size(*size, "request"): {Size(*size, "prompt"): 1.0, Size(*size, "token"): self.new_tokens - 1.0}
            for size in self.sizes
        }

    def feeds(self, folder: Path, vocabulary: int) -> dict[Size, Feeds]:
        """Size of each call -> its texts of random tokens, without padding."""
        return {
            Size(batch, prompt, phase): self._texts(folder, vocabulary, batch, prompt, phase)
            for batch, prompt in self.sizes
            for phase in CALLS
        }

    def _texts(self, folder: Path, vocabulary: int, batch: int, prompt: int, phase: Phase) -> Feeds:
        """Texts of a call, with the number of tokens that precede it."""
        has_encoder = (folder / ENCODER).is_file()
        after = max(1, self.new_tokens // 2) if phase == "token" else 0
        earlier = after if has_encoder or not after else prompt + after
        read = 1 if has_encoder or after else prompt
        # Sessions read the number of texts off the first array.
        return {**random_texts(folder, vocabulary, batch, prompt, earlier + read), _EARLIER: np.array(earlier)}


def random_texts(folder: Path, vocabulary: int, batch: int, source: int, length: int, *, seed: int = 0) -> Feeds:
    """Random texts without padding.

    Args:
        source: number of tokens of the encoder, where there is one.
        length: number of tokens of the decoder.
        seed: seed of the tokens.
    """
    ids = np.random.default_rng(seed).integers(0, vocabulary, (batch, length))
    if not (folder / ENCODER).is_file():
        return {TEXT: ids, MASK: np.ones_like(ids)}
    read = trial_feeds(load(folder / ENCODER), batch, source, seed=seed)
    return {name: np.ones_like(array) if name == MASK else array for name, array in read.items()} | {TARGET: ids}


class Call:
    """A call of a workload, whose earlier tokens are read already; returns the logits `[batch, position, vocabulary]`.

    Args:
        feeds: the texts of the call, from `Workload.feeds`; or whole texts, which are read at once.
    """

    def __init__(self, sessions: Sessions, feeds: Feeds) -> None:
        self._sessions, self._feeds = sessions, feeds
        self._start, self._end = int(feeds.get(_EARLIER, np.array(0))), decoded_ids(feeds).shape[1]
        self._before = self._next = None
        if self._start:
            self._before = step(sessions, feeds, 0, self._start, begin(sessions, feeds))[1].copy()

    _before: Caches | None
    _next: Caches | None

    def prepare(self) -> None:
        """Move the keys and values of earlier tokens to where the next call reads them; this is not timed."""
        if self._before is not None:
            self._next = self._before.copy()
            self._next.load()

    def __call__(self) -> np.ndarray:
        if self._next is None:
            self.prepare()
        caches, self._next = self._next or begin(self._sessions, self._feeds), None
        return step(self._sessions, self._feeds, self._start, self._end, caches)[0]


@dataclass(kw_only=True, eq=False)
class CachedEngine(Engine):
    """The engines of a folder that generates, which make the calls of a workload, or read whole texts at once."""

    sessions: Sessions = field(repr=False)
    _prepared: tuple[Feeds, Call] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, sessions: Sessions) -> CachedEngine:
        """The engine of loaded sessions."""
        return cls(
            path=sessions.path,
            specs=(),
            outputs=(LOGITS,),
            precision="fp32",
            attentions=0,
            fused=0,
            kernels={},
            optimization="",
            session=sessions.settings,
            host=sessions.host,
            sessions=sessions,
        )

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Logits of a call of a workload, or of whole texts; see `Engine.run`."""
        return {LOGITS: self.call(feeds)()}

    def call(self, feeds: Feeds) -> Call:
        """See `Engine.call`."""
        if self._prepared is None or self._prepared[0] is not feeds:
            self._prepared = feeds, Call(self.sessions, feeds)
        return self._prepared[1]

    def generator(self, model: Any) -> EngineModel:
        """A model that generates with the settings of `model`; see `Engine.generator`."""
        from compressor.generation.engine_model import EngineModel  # needs PyTorch, as rows do

        engine = EngineModel.of(type(model), model.config, self.sessions)
        engine.generation_config = model.generation_config
        return engine

    def memory(self, feeds: Feeds) -> int | None:
        """Unknown: engines of a workload are timed alone."""
        return None
