"""Run the graphs of a model that generates over a text: the first tokens at once, then a few at a time."""

from __future__ import annotations

import numpy as np

from compressor.targets.base import Feeds
from compressor.targets.caches import Caches, Sessions, positions
from compressor.targets.relative_error import Outputs

TEXT, MASK, TARGET, LOGITS = "input_ids", "attention_mask", "decoder_input_ids", "logits"
_LAST_STEPS = (1, 2, 1, 1)
"""Tokens of the steps at the end of a text, after those that are read at once."""


def run_in_steps(sessions: Sessions, feeds: Feeds) -> Outputs:
    """Logits of a whole text `[batch, position, vocabulary]`.

    Args:
        feeds: inputs of the whole model, with a mask that has zeros for padding.
    """
    texts, length = decoded_ids(feeds).shape
    # Operators with caches may take several tokens after the first ones of a single text alone.
    last = _LAST_STEPS if texts == 1 else [1] * len(_LAST_STEPS)
    after = np.cumsum([max(1, length - sum(last)), *last]).tolist()
    ends = [end for end in after if end < length] + [length]
    caches, parts = begin(sessions, feeds), list[np.ndarray]()
    for start, stop in zip([0, *ends], ends, strict=False):
        logits, caches = step(sessions, feeds, start, stop, caches)
        parts.append(logits)
    return {LOGITS: np.concatenate(parts, axis=1)}


def decoded_ids(feeds: Feeds) -> np.ndarray:
    """The tokens that the decoder reads."""
    return feeds[TARGET if TARGET in feeds else TEXT]


def begin(sessions: Sessions, feeds: Feeds) -> Caches:
    """The caches before the first token: empty, and what the encoder computes."""
    return sessions.encode(feeds) if TARGET in feeds else sessions.start(len(decoded_ids(feeds)))


def step(sessions: Sessions, feeds: Feeds, start: int, stop: int, caches: Caches) -> tuple[np.ndarray, Caches]:
    """Logits `[batch, stop - start, vocabulary]` of some tokens, and the caches after them.

    Args:
        start: position of the first token.
        stop: position after the last one.
    """
    ids, mask = decoded_ids(feeds)[:, start:stop], feeds.get(MASK)
    if TARGET in feeds:
        return sessions.decode(ids, mask, None, caches)
    mask = np.ones_like(feeds[TEXT]) if mask is None else mask
    return sessions.decode(ids, mask[:, :stop], positions(mask)[:, start:stop], caches)


def padded_left(feeds: Feeds) -> dict[str, np.ndarray]:
    """Inputs of a decoder-only model whose padding is moved from the right to the left, as generation needs it."""
    if MASK not in feeds:
        return {TEXT: feeds[TEXT]}
    shifts = (feeds[MASK] == 0).sum(axis=1)
    rows = zip(feeds[TEXT], feeds[MASK], shifts, strict=True)
    moved = [(np.roll(ids, shift), np.roll(mask, shift)) for ids, mask, shift in rows]
    return {TEXT: np.stack([ids for ids, _ in moved]), MASK: np.stack([mask for _, mask in moved])}
