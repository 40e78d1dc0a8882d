"""Run the graphs of a model that generates over a text: the first tokens at once, then a few at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from compressor.targets.base import Feeds
from compressor.targets.relative_error import Outputs
from graph_passes import load
from graph_passes.flow.caches import cache_names

Run = Callable[[Feeds], Outputs]
TEXT, MASK, TARGET, LOGITS = "input_ids", "attention_mask", "decoder_input_ids", "logits"


@dataclasses.dataclass(frozen=True)
class Steps:
    """The graphs of a model as one function of a whole text, which they read in steps.

    Args:
        decoder: runs the decoder.
        inputs: names of its inputs.
        caches: name of a cache's input -> the output that holds its content.
        empty: name of a cache's input -> an empty cache `[1, head, 0, width]`, for those that the decoder fills.
        encoder: runs the encoder; None: the model has none.
    """

    decoder: Run
    inputs: tuple[str, ...]
    caches: Mapping[str, str]
    empty: Mapping[str, np.ndarray]
    encoder: Run | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values that a token adds to the caches of a text."""
        return sum(array.shape[1] * array.shape[3] * array.itemsize for array in self.empty.values())

    @classmethod
    def of(cls, files: Mapping[str, Run], decoder: Path) -> Steps:
        """The graphs of a folder.

        Args:
            files: name of each graph -> what runs it, in the order in which they run; the last is the decoder.
            decoder: file of the decoder.
        """
        model = load(decoder)
        caches = cache_names(model)
        filled = {value.name for value in model.graph.outputs}
        empty = {}
        for value in model.graph.inputs:
            if caches.get(value.name or "") in filled and value.shape is not None and value.dtype is not None:
                heads, width = value.shape[1], value.shape[3]
                empty[value.name or ""] = np.zeros((1, int(str(heads)), 0, int(str(width))), value.dtype.numpy())
        *encoder, last = files.values()
        return cls(last, tuple(v.name or "" for v in model.graph.inputs), caches, empty, *encoder)

    def begin(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """The caches before the first token: empty, and those that the encoder computes.

        Args:
            feeds: inputs of the whole model.
        """
        rows = len(next(iter(feeds.values())))
        caches = {name: np.repeat(array, rows, axis=0) for name, array in self.empty.items()}
        if self.encoder is not None:
            outputs = self.encoder({name: array for name, array in feeds.items() if not name.startswith("decoder_")})
            caches |= {name: outputs[output] for name, output in self.caches.items() if output in outputs}
        return caches

    def step(
        self, feeds: Feeds, start: int, stop: int, caches: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits `[batch, stop - start, vocabulary]` of some tokens, and the caches after them.

        Args:
            feeds: inputs of the whole model, with a mask that has zeros for padding.
            start: position of the first token.
            stop: position after the last one.
            caches: the caches before them.
        """
        ids = feeds[TEXT if self.encoder is None else TARGET]
        mask = feeds.get(MASK, np.ones_like(ids))
        values = {
            TEXT: ids[:, start:stop],
            MASK: mask[:, :stop],
            "encoder_attention_mask": mask,
            "position_ids": positions(mask)[:, start:stop],
            **caches,
        }
        outputs = self.decoder({name: values[name] for name in self.inputs})
        after = {name: outputs.get(output, caches[name]) for name, output in self.caches.items()}
        return outputs[LOGITS], after

    def run(self, feeds: Feeds, lengths: Sequence[int] = (1, 2, 1, 1)) -> Outputs:
        """Logits of a whole text `[batch, position, vocabulary]`.

        Args:
            feeds: inputs of the whole model.
            lengths: numbers of tokens of the last steps; the tokens before them are read at once.
        """
        ids = feeds[TEXT if self.encoder is None else TARGET]
        after = np.cumsum([max(1, ids.shape[1] - sum(lengths)), *lengths]).tolist()
        ends = [end for end in after if end < ids.shape[1]] + [ids.shape[1]]
        caches, parts = self.begin(feeds), list[np.ndarray]()
        for start, stop in zip([0, *ends], ends, strict=False):
            logits, caches = self.step(feeds, start, stop, caches)
            parts.append(logits)
        return {LOGITS: np.concatenate(parts, axis=1)}


def positions(mask: np.ndarray) -> np.ndarray:
    """The position of each token `[batch, position]`: tokens are counted without padding on the left."""
    return np.maximum(mask.cumsum(axis=1) - 1, 0)


def padded_left(feeds: Feeds) -> dict[str, np.ndarray]:
    """Inputs of a decoder-only model whose padding is moved from the right to the left, as generation needs it."""
    if MASK not in feeds:
        return {TEXT: feeds[TEXT]}
    shifts = (feeds[MASK] == 0).sum(axis=1)
    rows = zip(feeds[TEXT], feeds[MASK], shifts, strict=True)
    moved = [(np.roll(ids, shift), np.roll(mask, shift)) for ids, mask, shift in rows]
    return {TEXT: np.stack([ids for ids, _ in moved]), MASK: np.stack([mask for _, mask in moved])}
