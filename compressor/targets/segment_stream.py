"""Read a text through an engine segment by segment, as `AllAttentionForCausalLM` reads it: each with the memories of
the segments before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from compressor.errors import InputError
from compressor.segment_memory import MEMORY_LENGTH, MAX_POSITIONS, MemoryLimits, memory_names, new_memory_names
from compressor.targets.base import Engine
from graph_passes import load


def limits(graph: Path) -> MemoryLimits | None:
    """What the model of a graph remembers; None where it has no memory.

    Raises:
        GraphError: the file cannot be read.
        InputError: the width of its memory is not fixed.
    """
    model = load(graph)
    shapes = {str(value.name): value.shape for value in model.graph.inputs}
    if "memory_0" not in shapes:
        return None
    layers, shape = sum(name.startswith("memory_") for name in shapes), shapes["memory_0"]
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int):
        sizes = "of no known shape" if shape is None else f"[{', '.join(map(str, shape))}]"
        raise InputError(
            f"{graph}: memory_0 is {sizes}, not [batch, memory, width] of a fixed width; export the model again"
        )
    known = {name: int(text) for name, text in model.metadata_props.items() if name in (MEMORY_LENGTH, MAX_POSITIONS)}
    return MemoryLimits(layers, shape[2], known.get(MEMORY_LENGTH), known.get(MAX_POSITIONS))


def empty_memories(graph: Path, batch: int) -> dict[str, np.ndarray]:
    """Memories of a text of which nothing was read yet, `[batch, 0, hidden]`; none where the graph has none."""
    found = limits(graph)
    return {} if found is None else dict(zip(memory_names(found.layers), _empty(found, batch), strict=True))


def _empty(found: MemoryLimits, batch: int) -> list[np.ndarray]:
    return [np.zeros((batch, 0, found.hidden_size), np.float32)] * found.layers


class Stream:
    """Texts on their way through an engine, one a row.

    Args:
        engine: built from `graph`.
        graph: an ONNX file with inputs `input_ids`, `memory_0`, ... and outputs `logits`, `new_memory_0`, ...

    Raises:
        InputError: the graph has no memory, or one whose width is not fixed.
    """

    def __init__(self, engine: Engine, graph: Path) -> None:
        found = limits(graph)
        if found is None:
            raise InputError(f"{graph}: has no memory_0 among its inputs; export a model that reads segment by segment")
        self.engine, self.limits = engine, found
        self.memories: Sequence[np.ndarray] | np.ndarray = ()
        """One a layer, `[batch, memory, hidden]`; none before the first segment. May be set to go on elsewhere, to one
        array `[layer, batch, memory, hidden]` too."""

    def read(self, input_ids: np.ndarray) -> np.ndarray:
        """Logits `[batch, segment, vocabulary]` of the next segment `[batch, segment]` of every text.

        Raises:
            InputError: the memories do not fit, or the segment is longer than positions allow; nothing is changed.
        """
        if input_ids.ndim != 2 or input_ids.dtype.kind not in "iu" or not input_ids.shape[1]:
            raise InputError(
                f"a segment of {input_ids.dtype} {list(input_ids.shape)} was given; give token ids [batch, segment]"
            )
        batch, segment = input_ids.shape
        memories = self.memories if len(self.memories) else _empty(self.limits, batch)
        self.limits.check(batch, segment, [memory.shape for memory in memories])
        named: Mapping[str, np.ndarray] = dict(zip(memory_names(self.limits.layers), memories, strict=True))
        outputs = self.engine.run({"input_ids": input_ids.astype(np.int64), **named})
        self.memories = [outputs[name] for name in new_memory_names(self.limits.layers)]
        return outputs["logits"]
