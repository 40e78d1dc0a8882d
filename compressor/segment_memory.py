"""The state of a language model that reads segment by segment: its names in a graph, and what may be given as it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from compressor.errors import InputError

T = TypeVar("T")

LENGTH, POSITIONS = "compressor.memory_length", "compressor.max_positions"
"""Metadata of a graph: what `Limits` holds of the same names."""


def memory_names(layers: int) -> list[str]:
    """Inputs of a graph: the hidden states before each layer of the segments before, `[batch, memory, hidden]`."""
    return [f"memory_{layer}" for layer in range(layers)]


def new_memory_names(layers: int) -> list[str]:
    """Outputs of a graph: the memories to give with the next segment."""
    return [f"new_memory_{layer}" for layer in range(layers)]


def listed(named: Mapping[str, T]) -> list[T]:
    """The memories among named inputs, in the order of layers. The rest is left out.

    Raises:
        InputError: one is missing.
    """
    names = memory_names(sum(name.startswith("memory_") for name in named))
    for name in names:
        if name not in named:
            raise InputError(f"{name} is missing beside {', '.join(named)}; give one memory a layer")
    return [named[name] for name in names]


@dataclass(frozen=True)
class Limits:
    """What a model remembers.

    Attributes:
        layers: how many memories there are.
        hidden_size: their width.
        memory_length: most positions in one; None: not known.
        max_positions: most positions of memory and segment together; None: not known.
    """

    layers: int
    hidden_size: int
    memory_length: int | None = None
    max_positions: int | None = None

    def check(self, batch: int, segment: int, memories: Iterable[Sequence[int]]) -> None:
        """Make sure that a segment and the memories given with it fit.

        Args:
            batch, segment: rows and positions of the segment.
            memories: the shape of each memory; none at all for a text's first segment.

        Raises:
            InputError: one line that says what does not fit.
        """
        shapes = [tuple(int(size) for size in shape) for shape in memories]
        if shapes and len(shapes) != self.layers:
            raise InputError(f"{len(shapes)} memories were given, the model has {self.layers} layers; give one each")
        past = shapes[0][1] if shapes and len(shapes[0]) > 1 else 0
        for layer, shape in enumerate(shapes):
            if shape != (batch, past, self.hidden_size):
                raise InputError(
                    f"memory_{layer} is {list(shape)}, not [batch {batch}, length {past}, hidden {self.hidden_size}]; "
                    "give the memories that the segment before returned"
                )
        if self.memory_length is not None and past > self.memory_length:
            raise InputError(
                f"memories hold {past} positions, the model keeps {self.memory_length} (memory_length); give the last "
                f"{self.memory_length}"
            )
        if self.max_positions is not None and past + segment > self.max_positions:
            raise InputError(
                f"{past} positions of memory and {segment} of the segment are more than the model's "
                f"{self.max_positions} (max_position_embeddings); give shorter segments"
            )
