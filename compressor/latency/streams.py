"""Streams of generated tokens with their times, from any source.

A source is an engine that generates on this machine (`local_generator`), or an endpoint of a server that sends text in
parts (`event_streams`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from compressor.errors import ErrorCode, ServerError
from compressor.targets.base import Feeds
from compressor.targets.relative_error import Outputs

PROMPTS = 4
"""Number of prompts whose outputs are compared."""


class Part(NamedTuple):
    """A part of a text, as a source sends it.

    Attributes:
        text: a part of the text, which may be empty; None: there is only a number of tokens.
        tokens: number of tokens so far, this part included; None: the source does not count them here.
    """

    text: str | None
    tokens: int | None = None


@dataclass(frozen=True)
class Stream:
    """A text that a source generated, and when its parts arrived.

    Attributes:
        text: the text.
        arrivals: milliseconds from the request to each part.
        tokens: number of tokens; that of the parts where the source does not count them.
    """

    text: str
    arrivals: np.ndarray
    tokens: int

    @property
    def first(self) -> float:
        """Milliseconds to the first token."""
        return float(self.arrivals[0])

    @property
    def per_token(self) -> float:
        """Milliseconds per token after the first one."""
        return float(self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> np.ndarray:
        """Milliseconds between each part and the next one."""
        return np.diff(self.arrivals)


class CheckedModel(Protocol):
    """A model of a check.

    Attributes:
        name: name of the model, path of its file or folder, or its URL.
        host: where it runs: runtime and device, or the server's name, version and address.
        graph: ONNX file of the function that it computes, or the folder of its graphs; None for a server.
        tolerance: largest relative error of its outputs.
    """

    name: str
    host: str
    tolerance: float

    @property
    def graph(self) -> Path | None: ...

    def infer(self, request: Any) -> Outputs:
        """The outputs of one encoded batch or prompt, by name."""

    def wait_until_idle(self) -> None:
        """Wait until the threads of earlier calls are idle."""


class TokenSource(CheckedModel, Protocol):
    """A model that generates from a prompt, one after the other.

    Attributes:
        vocabulary: number of tokens that prompts are drawn from; 0 where they consist of words.
    """

    vocabulary: int

    def prompt(self, number: int) -> Feeds:
        """A random prompt; prompts of different numbers differ."""

    def stream(self, prompt: Feeds) -> Iterator[Part]:
        """The parts of the text of a prompt, when they arrive; the work begins with the first one that is read."""


def read_stream(source: TokenSource, prompt: Feeds) -> Stream:
    """The whole text of a prompt, with the times of its parts.

    Raises:
        ServerError: the text has fewer than two parts, or the server fails.
    """
    texts, arrivals, tokens = list[str](), list[float](), 0
    parts = source.stream(prompt)
    start = perf_counter()
    for part in parts:
        texts.append(part.text or "")
        if part.text is not None and (part.tokens is None or part.tokens > tokens):
            arrivals.append(1e3 * (perf_counter() - start))
        tokens = tokens if part.tokens is None else part.tokens
    tokens = tokens if tokens > 1 else len(arrivals)
    if len(arrivals) < 2:
        text = (
            f"{source.name}: a text of {tokens} tokens arrives in {len(arrivals)} parts, so there is no time between"
            " tokens; name an endpoint that sends each token, or generate more tokens (--new-tokens)"
        )
        raise ServerError(text, code=ErrorCode.SERVER_ERROR, url=source.name, count=tokens)
    return Stream("".join(texts), np.array(arrivals), tokens)
