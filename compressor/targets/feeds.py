"""Inputs for any graph: random, and valid as far as the graph itself says what is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError

_CARRIERS = frozenset(("Cast", "Clip", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze"))
_CARRIERS |= {"Transpose", "Unsqueeze", "Where"}
_FALLBACK_RANGE = 2
"""Integers that look nothing up may be flags."""


def random_feeds(
    model: ir.Model, batch: int, seq: int, *, seed: int = 0, padded: bool = False
) -> dict[str, np.ndarray]:
    """One batch for a graph whose inputs are known by name and type alone.

    Ids are drawn below the number of rows of every table that they look up; positions count up from zero; masks are
    ones; key/value caches are empty; everything else is normal noise.

    Args:
        model: the graph.
        batch: size of free leading axes.
        seq: size of every other free axis.
        seed: of the draws.
        padded: mask out the last quarter of every second row (one position at least), where there is a mask.

    Raises:
        InputError: the graph fixes its batch at another size.
    """
    rng = np.random.default_rng(seed)
    return {
        value.name or "": _content(value, _shape(value, batch, seq), rng, padded)
        for value in model.graph.inputs
        if not value.is_initializer()
    }


def _shape(value: ir.Value, batch: int, seq: int) -> tuple[int, ...]:
    shape = []
    for axis, dim in enumerate(value.shape or ()):
        if isinstance(dim, ir.SymbolicDim):
            # A cache is as long as the past, which is empty; `past_sequence_length + sequence_length` is not the past.
            past = re.fullmatch(r"past\w*", str(dim.value or "")) is not None
            shape.append(batch if axis == 0 else 0 if past else seq)
        else:
            if axis == 0 and len(value.shape or ()) > 1 and dim != batch:
                raise InputError(
                    f"{value.name}: the graph fixes the batch at {dim}, {batch} was asked for; ask for {dim} or export "
                    "the graph with a free batch axis"
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
