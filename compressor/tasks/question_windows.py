"""Windows over the context of a question, and the span that their logits predict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from compressor.tasks.squad import Answer

LONGEST_ANSWER = 30
"""Maximum number of tokens of a predicted answer, as is usual for SQuAD."""


@dataclass(frozen=True)
class Window:
    """The tokens of the context in one window.

    Attributes:
        first: position of the first of these tokens in the window.
        characters: first character of each token in the context and the one after its last, `[tokens, 2]`.
    """

    first: int
    characters: np.ndarray

    def token_span(self, answer: Answer) -> tuple[int, int]:
        """Positions of the first and the last token of an answer; (0, 0) unless the whole answer is in the window."""
        starts, ends = self.characters.T
        end = answer.start + len(answer.text)
        first = int(np.searchsorted(ends, answer.start, side="right"))
        last = int(np.searchsorted(starts, end, side="left")) - 1
        if starts[0] > answer.start or ends[-1] < end or first > last:
            return 0, 0
        return self.first + first, self.first + last


@dataclass(frozen=True)
class Question:
    """The context, accepted answers and windows of one question.

    Attributes:
        context: the whole text.
        answers: every accepted answer.
        windows: the windows that cover the context, in order.
    """

    context: str
    answers: tuple[str, ...]
    windows: tuple[Window, ...]

    def predict(self, logits: np.ndarray) -> str:
        """The text of the best span of all windows, from logits `[windows, tokens, 2]`."""
        spans = []
        for window, scores in zip(self.windows, logits, strict=True):
            inside = scores[window.first : window.first + len(window.characters)]
            score, first, last = best_span(inside[:, 0], inside[:, 1])
            spans.append((score, window.characters[first, 0], window.characters[last, 1]))
        _, start, end = max(spans, key=lambda span: span[0])
        return self.context[start:end]


def best_span(start: np.ndarray, end: np.ndarray, longest: int = LONGEST_ANSWER) -> tuple[float, int, int]:
    """The largest `start[i] + end[j]` with `i <= j < i + longest`, and its i and j.

    Args:
        start: logits of the first token, `[tokens]`.
        end: logits of the last token, `[tokens]`.
        longest: maximum number of tokens of a span.
    """
    padded = np.concatenate([end, np.full(longest - 1, -np.inf, end.dtype)])
    scores = start[:, None] + np.lib.stride_tricks.sliding_window_view(padded, longest)
    first, offset = np.unravel_index(scores.argmax(), scores.shape)
    return float(scores[first, offset]), int(first), int(first + offset)


def windows_of(encoding: Any) -> Iterator[Window]:
    """The windows in a tokenizer's encoding of (question, context) pairs, which includes offsets."""
    for number, characters in enumerate(encoding["offset_mapping"]):
        inside = np.flatnonzero([text == 1 for text in encoding.sequence_ids(number)])
        first = int(inside[0]) if len(inside) else 0
        yield Window(first, np.array(characters[first : first + len(inside)], np.int32).reshape(-1, 2))
