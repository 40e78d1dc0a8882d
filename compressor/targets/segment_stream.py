"""Read texts with an engine segment by segment, passing the memories of each segment to the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from compressor.errors import ErrorCode, InputError
from compressor.segment_memory import MAX_POSITIONS, MEMORY_LENGTH, MemoryLimits, memory_names, new_memory_names
from compressor.targets.base import Engine
from graph_passes import load


def limits(graph: Path) -> MemoryLimits | None:
    """Number and sizes of a graph's memories; None where it has no memory.

    Raises:
        GraphError: the file cannot be read.
        InputError: the width of its memories is not fixed.
    """
    model = load(graph)
    shapes = {str(value.name): value.shape for value in model.graph.inputs}
    if "memory_0" not in shapes:
        return None
    layers, shape = sum(name.startswith("memory_") for name in shapes), shapes["memory_0"]
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int):
        sizes = "unknown" if shape is None else f"[{', '.join(map(str, shape))}]"
        raise InputError(
            f"{graph}: the shape of memory_0 is {sizes}, and [batch, memory, width] of a fixed width is needed; export"
            " the model again",
            code=ErrorCode.TENSOR_MISMATCH,
            path=graph,
            tensor="memory_0",
            shape=None if shape is None else tuple(map(str, shape)),
        )
    texts = (model.metadata_props.get(name, "") for name in (MEMORY_LENGTH, MAX_POSITIONS))
    memory, positions = (int(text) if text.isdecimal() else None for text in texts)
    return MemoryLimits(layers, shape[2], memory, positions)


class Stream:
    """Reads texts with an engine, one text per row of the batch.

    Args:
        engine: the engine, built from `graph`.
        graph: an ONNX file with inputs `input_ids`, `memory_0`, ... and outputs `logits`, `new_memory_0`, ...

    Attributes:
        engine: the engine.
        limits: number and sizes of its memories.
        memories: one array `[batch, memory, hidden]` per layer; empty before the first segment. Assign stored memories
            to continue from them; one array `[layer, batch, memory, hidden]` is accepted too.

    Raises:
        InputError: the graph has no memory, or one whose width is not fixed.
    """

    def __init__(self, engine: Engine, graph: Path) -> None:
        sizes = limits(graph)
        if sizes is None:
            text = f"{graph}: has no input memory_0; export a model that reads segment by segment"
            raise InputError(text, code=ErrorCode.TENSOR_MISMATCH, path=graph, tensor="memory_0")
        self.engine, self.limits = engine, sizes
        self.memories: Sequence[np.ndarray] | np.ndarray = ()

    def read(self, input_ids: np.ndarray) -> np.ndarray:
        """Read the next segment of every text, and keep the new memories.

        Args:
            input_ids: token ids `[batch, segment]`.

        Returns:
            Logits `[batch, segment, vocabulary]`.

        Raises:
            InputError: the memories do not fit, or the segment exceeds the positions; `memories` is unchanged.
        """
        if input_ids.ndim != 2 or input_ids.dtype.kind not in "iu" or not input_ids.shape[1]:
            text = (
                f"input_ids: {input_ids.dtype} {list(input_ids.shape)}; pass integer token ids [batch, segment], one or"
                " more per text"
            )
            raise InputError(text, code=ErrorCode.TENSOR_MISMATCH, tensor="input_ids", shape=input_ids.shape)
        batch, segment = input_ids.shape
        empty = [np.zeros((batch, 0, self.limits.hidden_size), np.float32)] * self.limits.layers
        memories = self.memories if len(self.memories) else empty
        self.limits.check(batch, segment, [memory.shape for memory in memories])
        inputs: Mapping[str, np.ndarray] = dict(zip(memory_names(self.limits.layers), memories, strict=True))
        outputs = self.engine.run({"input_ids": input_ids.astype(np.int64), **inputs})
        self.memories = [outputs[name] for name in new_memory_names(self.limits.layers)]
        return outputs["logits"]
