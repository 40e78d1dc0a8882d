"""Memories of language models that read a text segment by segment: their names in a graph, and their limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from compressor.errors import ErrorCode, InputError

T = TypeVar("T")

MEMORY_LENGTH, MAX_POSITIONS = "compressor.memory_length", "compressor.max_positions"
"""Metadata keys of a graph: the fields `memory_length` and `max_positions` of `MemoryLimits`."""


def memory_names(layers: int) -> list[str]:
    """Graph inputs, one per layer: hidden states before the layer of earlier segments, `[batch, memory, hidden]`."""
    return [f"memory_{layer}" for layer in range(layers)]


def new_memory_names(layers: int) -> list[str]:
    """Graph outputs, one per layer: the memories to pass in with the next segment."""
    return [f"new_memory_{layer}" for layer in range(layers)]


def ordered_memories(inputs: Mapping[str, T]) -> list[T]:
    """The memories among named inputs, in the order of the layers; other inputs are ignored.

    Raises:
        InputError: the memory of a layer is missing, or an input is called `memory`.
    """
    if "memory" in inputs:
        text = (
            "memory: unknown; pass the memories of all layers as `memories`, or one by one as memory_0, memory_1, ..."
        )
        raise InputError(text, code=ErrorCode.UNKNOWN_NAME, tensor="memory")
    names = memory_names(sum(name.startswith("memory_") for name in inputs))
    for name in names:
        if name not in inputs:
            text = f"{name}: missing among the inputs {', '.join(inputs)}; pass one memory per layer"
            raise InputError(text, code=ErrorCode.TENSOR_MISMATCH, tensor=name)
    return [inputs[name] for name in names]


@dataclass(frozen=True)
class MemoryLimits:
    """The number and the sizes of a model's memories.

    Attributes:
        layers: number of memories.
        hidden_size: width of each memory.
        memory_length: maximum number of positions in a memory; None: unknown.
        max_positions: maximum number of positions of a memory and a segment together; None: unknown.
    """

    layers: int
    hidden_size: int
    memory_length: int | None = None
    max_positions: int | None = None

    def check(self, batch: int, segment: int, memories: Iterable[Sequence[int]]) -> None:
        """Raise InputError unless the model reads a segment with these memories, by their shapes and lengths.

        Args:
            batch: rows of the segment.
            segment: positions of the segment.
            memories: shape of each memory; empty for the first segment of a text.
        """
        shapes = [tuple(int(size) for size in shape) for shape in memories]
        if shapes and len(shapes) != self.layers:
            text = f"{len(shapes)} memories: the model has {self.layers} layers; pass one memory per layer"
            raise InputError(text, code=ErrorCode.TENSOR_MISMATCH, memories=len(shapes), layers=self.layers)
        past = shapes[0][1] if shapes and len(shapes[0]) > 1 else 0
        for layer, shape in enumerate(shapes):
            expected = (batch, past, self.hidden_size)
            if shape != expected:
                raise InputError(
                    f"memory_{layer}: its shape is {list(shape)}, expected [batch {batch}, length {past}, hidden"
                    f" {self.hidden_size}]; pass the memories that the previous segment returned",
                    code=ErrorCode.TENSOR_MISMATCH,
                    tensor=f"memory_{layer}",
                    shape=shape,
                    expected=expected,
                )
        if self.memory_length is not None and past > self.memory_length:
            raise InputError(
                f"memories of {past} positions: the model keeps {self.memory_length} (memory_length); pass the last"
                f" {self.memory_length}",
                code=ErrorCode.OUT_OF_RANGE,
                field="memory_length",
                value=past,
                maximum=self.memory_length,
            )
        if self.max_positions is not None and past + segment > self.max_positions:
            raise InputError(
                f"{past} memory positions and {segment} segment positions: the model takes {self.max_positions}"
                " together (max_position_embeddings); pass shorter segments",
                code=ErrorCode.OUT_OF_RANGE,
                field="max_positions",
                value=past + segment,
                maximum=self.max_positions,
            )
