"""Inputs for any graph: random, and valid as far as the graph itself says what is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError
from compressor.segment_memory import MEMORY_LENGTH, MAX_POSITIONS

_CARRIERS = frozenset(("Cast", "Clip", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze"))
_CARRIERS |= {"Transpose", "Unsqueeze", "Where"}
_FALLBACK_RANGE = 2
"""Integers that look nothing up may be flags."""


Axis = Literal["batch", "memory", "past", "length"]


def free_axis(value: ir.Value, axis: int) -> Axis:
    """What a free axis of an input counts: rows, positions of a memory, of a key/value cache, or tokens."""
    if axis == 0:
        return "batch"
    if axis == 1 and str(value.name).startswith("memory_"):
        return "memory"
    # A cache is as long as the past; `past_sequence_length + sequence_length` is not the past alone.
    dim = value.shape[axis] if value.shape is not None else None
    past = isinstance(dim, ir.SymbolicDim) and re.fullmatch(r"past\w*", str(dim.value or ""))
    return "past" if past else "length"


def memory_beside(model: ir.Model, seq: int) -> int | None:
    """Positions of memory that a graph's model keeps and has positions for beside `seq` tokens; None: it does not say.

    As many as `example_inputs` gives the model itself.
    """
    told = [model.metadata_props.get(name, "") for name in (MEMORY_LENGTH, MAX_POSITIONS)]
    if not all(text.isdecimal() for text in told):
        return None
    kept, positions = map(int, told)
    return max(0, min(kept, positions - seq))


def free_sizes(model: ir.Model, batch: int, seq: int, memory: int | None = None) -> dict[Axis, int]:
    """Sizes of the free axes of a graph's inputs; `memory` as in `random_feeds`."""
    if memory is None:
        memory = memory_beside(model, seq)
    return {"batch": batch, "length": seq, "memory": seq if memory is None else memory, "past": 0}


def fixed_batch(model: ir.Model) -> int | None:
    """The batch that the graph fixes; None where it takes any."""
    shapes = (value.shape for value in model.graph.inputs if not value.is_initializer())
    sizes = (shape[0] for shape in shapes if shape is not None and len(shape) > 1)
    return next((size for size in sizes if isinstance(size, int)), None)


def random_feeds(
    model: ir.Model, batch: int, seq: int, *, memory: int | None = None, seed: int = 0, padded: bool = False
) -> dict[str, np.ndarray]:
    """One batch for a graph whose inputs are known by name and type alone.

    Ids are drawn below the number of rows of every table that they look up; positions count up from zero; masks are
    ones; key/value caches are empty; everything else is normal noise.

    Args:
        model: the graph.
        batch: size of free leading axes.
        seq: size of every other free axis, but for those of caches and memories.
        memory: positions of memories; None: all that the model keeps beside `seq` tokens, `seq` where it does not say.
        seed: of the draws.
        padded: mask out the last quarter of every second row (one position at least), where there is a mask.

    Raises:
        InputError: the graph fixes its batch at another size.
    """
    rng = np.random.default_rng(seed)
    sizes = free_sizes(model, batch, seq, memory)
    return {
        value.name or "": _content(value, _shape(value, sizes), rng, padded)
        for value in model.graph.inputs
        if not value.is_initializer()
    }


def _shape(value: ir.Value, sizes: Mapping[Axis, int]) -> tuple[int, ...]:
    shape = []
    for axis, dim in enumerate(value.shape or ()):
        if isinstance(dim, ir.SymbolicDim):
            shape.append(sizes[free_axis(value, axis)])
        else:
            if axis == 0 and len(value.shape or ()) > 1 and dim != sizes["batch"]:
                raise InputError(
                    f"{value.name}: the graph fixes the batch at {dim}, {sizes['batch']} was asked for; ask for {dim}"
                    " or export the graph with a free batch axis"
                )
            shape.append(dim)
    return tuple(shape)


def _content(value: ir.Value, shape: tuple[int, ...], rng: np.random.Generator, padded: bool) -> np.ndarray:
    dtype = (value.dtype or ir.DataType.FLOAT).numpy()
    name = value.name or ""
    if "mask" in name:
        mask = np.ones(shape, dtype)
        if padded and mask.ndim == 2:
            mask[::-2, -max(1, shape[1] // 4) :] = 0
        return mask
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if "position" in name and shape:
        return np.broadcast_to(np.arange(shape[-1], dtype=dtype), shape).copy()
    rows = min(_tables(value), default=_FALLBACK_RANGE)
    return rng.integers(0, rows, shape).astype(dtype)


def _tables(value: ir.Value) -> Iterator[int]:
    """Rows of every table that the input is looked up in."""
    seen, front = {value}, [value]
    while front:
        for node, position in front.pop().uses():
            table = None
            if node.op_type == "Gather" and position == 1 and node.attributes.get_int("axis", 0) == 0:
                table = node.inputs[0]
            elif node.op_type == "EmbedLayerNormalization" and position < 2:
                table = node.inputs[(2, 4)[position]]
            if table is not None:
                rows = table.shape[0] if table.shape is not None and len(table.shape) > 1 else None
                if isinstance(rows, int) and table.is_initializer():
                    yield rows
            elif node.op_type in _CARRIERS and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                front.append(node.outputs[0])
