"""Engines of a model that generates, which keep keys and values from call to call.

A search for tokens, e.g. a beam search, runs a model through `Sessions`. Caches are tensors of the runtime: a search
passes them from one call to the next, and reads only how many positions they hold. A target whose engines keep caches
names the module that builds and opens them (`Target.caches`).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from compressor.errors import ErrorCode, InputError

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
"""The graphs of a folder that generates; only an encoder-decoder has an encoder."""
PLAN = "compressor.plan"
"""Entry of the metadata of a pruned graph, and of its engine: the digest of the plan."""
PADDING = "compressor.padding"
"""Entry of the metadata of a decoder that reads no padding on the left: `right`."""
WEIGHTS, FINER = "compressor.weights", "compressor.weights.finer"
"""Entries of the metadata of a decoder with rounded weights: the precision of the weights, and a JSON list of the
weights in the next finer precision."""
MASKS = ("attention_mask", "encoder_attention_mask")
"""Names of the mask of a decoder: over its own tokens, or over those of the encoder."""
POSITIONS = "position_ids"
"""Name of the decoder's input with the number of each new token in its text."""


@dataclass(frozen=True)
class GeneratingModel:
    """The facts about a model that libraries need to generate with its engine.

    Attributes:
        config: the content of `config.json`.
        generation: the content of `generation_config.json`.
        positions: maximum length of a text in tokens; None: it has none.
        tokenizer: the tokenizer of transformers; None: there is none.
    """

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    positions: int | None
    tokenizer: Any

    def token(self, name: str) -> Any:
        """The id or ids of a special token, by the name of its field; None: there is none."""
        token = self.generation.get(name)
        return self.config.get(name) if token is None else token


class Caches(ABC):
    """Keys and values of a batch of texts.

    Attributes:
        length: positions of the decoder that they hold.
        sources: index of the text of the encoder that each text of the decoder belongs to.
    """

    length: int
    sources: np.ndarray

    @property
    def batch(self) -> int:
        """Number of texts."""
        return len(self.sources)

    @abstractmethod
    def select(self, indices: np.ndarray) -> Self:
        """The caches of some texts of the batch, by their indices `[text]`, of which each may be repeated."""

    @abstractmethod
    def copy(self) -> Self:
        """The same caches, for one more call of `Sessions.decode`."""

    def load(self) -> None:
        """Move the caches to the memory that `Sessions.decode` reads; otherwise `decode` moves them itself."""
        return


class Sessions(ABC):
    """The graphs of a model, loaded into a runtime.

    Attributes:
        path: the file of the decoder.
        settings: runtime, device and options, as recorded in reports.
        vocabulary: number of logits of each position.
        precision: the precision of the decoder; of its weights alone where these have fewer bits, e.g. `int4w`.
        finer: names of the weights that have the next finer precision.
        bytes_per_token: bytes of keys and values that a token adds to the caches of a text.
    """

    path: Path
    settings: Mapping[str, Any]
    vocabulary: int
    precision: str
    finer: tuple[str, ...]
    bytes_per_token: int

    @property
    def host(self) -> str:
        """Runtime and device, for readers."""
        return f"{self.settings['runtime']} on {self.settings['provider']}, {self.settings['intra_op_threads']} threads"

    @abstractmethod
    def start(self, batch: int) -> Caches:
        """The caches of a decoder-only model before the first token of `batch` texts."""

    @abstractmethod
    def encode(self, inputs: Mapping[str, np.ndarray]) -> Caches:
        """The caches of an encoder-decoder before the first token: keys and values of the encoder's outputs.

        Args:
            inputs: `input_ids` and `attention_mask` `[text, position]`, or `input_features` `[text, channel, frame]`;
                inputs that the graph lacks are ignored.

        Raises:
            InputError: an input is missing, or the graph cannot run on these inputs.
        """

    @abstractmethod
    def decode(
        self, input_ids: np.ndarray, mask: np.ndarray | None, position_ids: np.ndarray | None, caches: Caches
    ) -> tuple[np.ndarray, Caches]:
        """Read further tokens.

        Args:
            input_ids: the tokens `[text, new position]`.
            mask: 1 for positions that are read, 0 for padding: `[text, earlier and new position]`, or those of the
                encoder `[text, source position]`; None where the graph has no mask.
            position_ids: number of each token in its text `[text, new position]`; None where the graph counts itself.
            caches: caches of the earlier positions. A runtime may extend them in place, so they serve one call;
                `Caches.copy` gives caches for another call.

        Returns:
            Logits `[text, new position, token]`, and the caches of earlier and new positions.

        Raises:
            InputError: an input is missing, the graph cannot run on these inputs, or the caches were read before.
        """


def positions(mask: np.ndarray) -> np.ndarray:
    """The number of each token in its text `[text, position]`: tokens are counted without padding on the left."""
    return np.maximum(mask.cumsum(axis=1) - 1, 0)


def require_decoder(folder: Path) -> None:
    """Raise InputError if a folder has no graph that generates."""
    if not (folder / DECODER).is_file():
        text = (
            f"{folder}: has no {DECODER}; give the output folder of a run on a model that generates, which contains"
            " this graph"
        )
        raise InputError(text, code=ErrorCode.FILE_MISSING, path=folder / DECODER)


def missing_encoder(path: Path, decoder: str) -> InputError:
    """The error of a folder without the encoder that its decoder needs.

    Args:
        decoder: the file name of the decoder.
    """
    text = f"{path.parent}: has no {path.name}, whose outputs {decoder} reads; copy it into the folder too"
    return InputError(text, code=ErrorCode.FILE_MISSING, path=path)


def plan_digest(kept: Mapping[str, Iterable[int]]) -> str:
    """A digest of a plan.

    Args:
        kept: name of a group -> the units that are kept.
    """
    content = json.dumps(sorted((name, sorted(units)) for name, units in kept.items()))
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"


def require_one_plan(folder: Path, digests: Mapping[str, str | None]) -> None:
    """Check that the graphs of a folder, and plan.json where there is one, are of one plan.

    Args:
        digests: name of a graph -> the plan that it records (`plan_digest`); None: it records none.

    Raises:
        InputError: they are of several plans.
    """
    known = {name: digest for name, digest in digests.items() if digest is not None}
    if known and (path := folder / "plan.json").is_file():
        from graph_passes import Plan  # a served model has neither a plan nor this module

        known[path.name] = plan_digest({group.name: group.kept for group in Plan.load(path).groups})
    if len(set(known.values())) > 1:
        first, *_, last = known
        text = f"{folder / first}: keeps different units than {last} records; copy the whole folder of one run"
        raise InputError(text, code=ErrorCode.FILE_MISMATCH, path=folder / first, files=tuple(known))
