"""Inputs on which a graph is tried, proven and timed: its example rows where it carries any, else random inputs.

Random inputs are valid as far as the graph determines which inputs are valid.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError, RowError
from compressor.segment_memory import MAX_POSITIONS, MEMORY_LENGTH
from compressor.targets.example_rows import read_example_rows
from graph_passes.flow.caches import read_caches
from graph_passes.flow.sizes import example_sizes, symbol_of

_CARRIERS = frozenset(
    "Cast Clip Concat Expand Flatten Identity Reshape Slice Squeeze Transpose Unsqueeze Where".split()
)
"""Operators whose output holds the ids of their input."""
_FLAG_RANGE = 2
"""Range of integers that index no table: they may be flags."""
_STORED_FORMS = frozenset("Cast DequantizeLinear Identity".split())
"""Operators through which a graph reads a table that is stored in another type."""
Axis = Literal["batch", "memory", "past", "length"]
_BOUNDING = frozenset(("Clip", "Where"))
"""Operators that may replace ids outside of a table."""


def trial_feeds(model: ir.Model, batch: int, seq: int, *, seed: int = 0, padded: bool = False) -> dict[str, np.ndarray]:
    """One batch of inputs for a graph, from its example rows where it carries any.

    Inputs without example rows are random; see `random_feeds`.

    Args:
        seq: size of every other free axis, except those of caches, memories, images and sounds.
        seed: seed of the random numbers, and number of the first example row that is used.
        padded: whether to mask the last quarter of every second row, at least one token, where there is a mask.

    Returns:
        Input name -> array.

    Raises:
        InputError: the graph fixes another batch size, or its metadata are damaged.
    """
    feeds = random_feeds(model, batch, seq, seed=seed, padded=padded)
    example = read_example_rows(model)
    if example is None:
        return feeds
    values = {str(value.name): value for value in model.graph.inputs}
    inputs = {name: rows for name, rows in example.inputs.items() if name in feeds}
    lengths = {name: feeds[name].shape[-1] for name in inputs if feeds[name].ndim}
    text = values["input_ids"].shape if "input_ids" in values else None
    if text is not None and isinstance(text[-1], ir.SymbolicDim):
        lengths["input_ids"] = lengths.get("input_ids", 0) + example.image_positions
    rows = range(batch - 1, -1, -2) if padded else ()
    sized = dataclasses.replace(example, inputs=inputs).sized(batch, lengths, first=seed, padded=rows)
    fitting = {name: array for name, array in sized.items() if _fits(values[name], array)}
    return feeds | {name: array.astype(feeds[name].dtype) for name, array in fitting.items()}


def draws_ids(model: ir.Model) -> bool:
    """Whether `trial_feeds` draws ids at random, which the model may not take: the graph has no rows of them."""
    example = read_example_rows(model)
    stored = example.inputs if example is not None else ()
    return any(is_id(value) and value.name not in stored for value in model.graph.inputs)


def has_random_inputs(model: ir.Model) -> bool:
    """Whether `trial_feeds` draws ids at random, or all inputs, such as those of images."""
    example = read_example_rows(model)
    return draws_ids(model) or example is None or not example.inputs


def _fits(value: ir.Value, array: np.ndarray) -> bool:
    """Whether an array has the axes of an input, and the sizes that the graph fixes."""
    shape = value.shape
    if shape is None or len(shape) != array.ndim:
        return False
    return all(isinstance(dim, ir.SymbolicDim) or dim == size for dim, size in zip(shape, array.shape, strict=True))


def axis_kind(value: ir.Value, axis: int) -> Axis:
    """The kind of a free axis of an input: the batch, the length of a memory or of a key/value cache, or tokens."""
    if axis == 0:
        return "batch"
    if axis == 1 and str(value.name).startswith("memory_"):
        return "memory"
    # A cache is as long as the past; an axis `past_sequence_length + sequence_length` counts new tokens too.
    dim = value.shape[axis] if value.shape is not None else None
    past = isinstance(dim, ir.SymbolicDim) and re.fullmatch(r"past\w*", str(dim.value or ""))
    return "past" if past else "length"


def memory_length(model: ir.Model, seq: int) -> int | None:
    """Length of the longest memory for a segment of `seq` tokens; None where the graph's metadata lack it.

    `model_folder.example_inputs` gives the PyTorch model memories of the same length.
    """
    limits = [model.metadata_props.get(name, "") for name in (MEMORY_LENGTH, MAX_POSITIONS)]
    if not all(text.isdecimal() for text in limits):
        return None
    longest, positions = map(int, limits)
    return max(0, min(longest, positions - seq))


def free_sizes(model: ir.Model, batch: int, seq: int) -> dict[Axis, int]:
    """Sizes of the free axes of a graph's inputs.

    Memories have the maximum length that the model takes, or `seq` where that is unknown.
    """
    memory = memory_length(model, seq)
    return {"batch": batch, "length": seq, "memory": seq if memory is None else memory, "past": 0}


def held_sizes(model: ir.Model) -> dict[str, int]:
    """Symbol of a free dimension -> its size in the exporter's example, which images and sounds must have.

    Dimensions of tokens may have other sizes: those of ids (`is_id`) and of embeddings.
    """
    held = example_sizes(model)
    for value in model.graph.inputs if held else ():
        if value.name == "inputs_embeds" or is_id(value):
            for axis, dim in enumerate(value.shape or ()):
                if isinstance(dim, ir.SymbolicDim):
                    held.pop(symbol_of(axis, dim), None)
    return held


def axis_size(value: ir.Value, axis: int, sizes: Mapping[Axis, int], held: Mapping[str, int]) -> int:
    """The size of an axis of an input.

    Args:
        sizes: sizes of free axes, from `free_sizes`.
        held: sizes of free axes that keep those of the exporter's example, from `held_sizes`.
    """
    dim = (value.shape or ())[axis]
    if not isinstance(dim, ir.SymbolicDim):
        return int(dim)
    kind = axis_kind(value, axis)
    return held.get(symbol_of(axis, dim), sizes[kind]) if kind == "length" else sizes[kind]


def fixed_batch(model: ir.Model) -> int | None:
    """The batch size that the graph fixes; None where it is free."""
    shapes = (value.shape for value in model.graph.inputs if not value.is_initializer())
    sizes = (shape[0] for shape in shapes if shape is not None and len(shape) > 1)
    return next((size for size in sizes if isinstance(size, int)), None)


def has_lengths(model: ir.Model) -> bool:
    """Whether a graph has inputs of tokens, of free or fixed length; images and sounds have one size."""
    held = held_sizes(model)
    for value in model.graph.inputs:
        free = [(axis, dim) for axis, dim in enumerate(value.shape or ()) if isinstance(dim, ir.SymbolicDim)]
        lengths = [symbol_of(axis, dim) for axis, dim in free if axis_kind(value, axis) == "length"]
        is_held = bool(lengths) and all(symbol in held for symbol in lengths)
        if not is_held and (lengths or has_integer_rows(value)):
            return True
    return False


def has_integer_rows(value: ir.Value) -> bool:
    """Whether an input is `[batch, length]` of integers, such as ids or a mask, and holds no sizes."""
    return len(value.shape or ()) == 2 and _is_integer(value) and "shape" not in (value.name or "")


def is_id(value: ir.Value) -> bool:
    """Whether an input has integers other than masks, positions and sizes: ids of tokens, their types, flags."""
    return _is_integer(value) and not any(word in (value.name or "") for word in ("mask", "position", "shape"))


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and not value.dtype.is_floating_point()


def random_feeds(
    model: ir.Model, batch: int, seq: int, *, seed: int = 0, padded: bool = False
) -> dict[str, np.ndarray]:
    """One batch of inputs for a graph, from the names, types and uses of its inputs; see `trial_feeds` for the sizes.

    Ids are drawn below the number of rows of every table that they index; positions count up from zero; masks are
    ones; key/value caches are empty; everything else is normal noise.

    Raises:
        InputError: the graph fixes another batch size.
    """
    rng = np.random.default_rng(seed)
    sizes, held = free_sizes(model, batch, seq), held_sizes(model)
    return {
        value.name or "": _content(value, _shape(value, sizes, held), rng, padded)
        for value in model.graph.inputs
        if not value.is_initializer()
    }


def decoding_feeds(model: ir.Model, batch: int, past: int, new: int = 1) -> dict[str, np.ndarray]:
    """The inputs of a call of a decoder after earlier tokens: `trial_feeds` of new tokens, and caches of noise.

    Args:
        model: the graph, whose metadata record its caches (`graph_passes.flow.caches`).
        past: number of earlier tokens; caches of another graph hold as many positions, at least one.

    Raises:
        InputError: the graph fixes another batch size, or its metadata are damaged.
    """
    rng = np.random.default_rng(0)
    feeds = trial_feeds(model, batch, new)
    lengths: dict[str, int] = {}
    for cache, present in read_caches(model).items():
        lengths[_positions(cache)] = past if present is not None else max(past, 1)
        if present is not None:
            lengths[_positions(present)] = past + new
    for value in model.graph.inputs:
        name, array = value.name or "", feeds[value.name or ""]
        shape = tuple(
            lengths.get(dim.value, size) if isinstance(dim, ir.SymbolicDim) and dim.value else size
            for dim, size in zip(value.shape or (), array.shape, strict=True)
        )
        if shape != array.shape:
            feeds[name] = _content(value, shape, rng, padded=False)
        elif "position" in name and array.ndim:
            feeds[name] = array + np.asarray(past, array.dtype)
    return feeds


def _positions(cache: ir.Value) -> str:
    """Name of the axis of positions of a cache `[batch, head, position, width]`; empty where its size is fixed."""
    dim = cache.shape[2] if cache.shape is not None and len(cache.shape) == 4 else None
    return (dim.value or "") if isinstance(dim, ir.SymbolicDim) else ""


def _shape(value: ir.Value, sizes: Mapping[Axis, int], held: Mapping[str, int]) -> tuple[int, ...]:
    shape = tuple(axis_size(value, axis, sizes, held) for axis in range(len(value.shape or ())))
    if len(shape) > 1 and shape[0] != sizes["batch"]:
        raise InputError(
            f"{value.name}: the graph fixes the batch size at {shape[0]}, and {sizes['batch']} was requested;"
            f" request {shape[0]}, or export the graph with a free batch axis",
            code=ErrorCode.TENSOR_MISMATCH,
            field="batch",
            tensor=value.name,
            value=sizes["batch"],
            expected=shape[0],
        )
    return shape


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
    rows = min(table_sizes(value), default=_FLAG_RANGE)
    return rng.integers(0, rows, shape).astype(dtype)


def table_sizes(value: ir.Value, *, without: frozenset[str] = frozenset()) -> Iterator[int]:
    """The number of rows of every table that an input indexes.

    Args:
        without: operators whose outputs are not followed.
    """
    visited, pending = {value}, [value]
    while pending:
        for node, position in pending.pop().uses():
            table = None
            if node.op_type == "Gather" and position == 1 and node.attributes.get_int("axis", 0) == 0:
                table = node.inputs[0]
            elif node.op_type == "EmbedLayerNormalization" and position < 2:
                table = node.inputs[(2, 4)[position]]
            if table is not None:
                stored = _stored(table)
                rows = stored.shape[0] if stored.shape is not None and len(stored.shape) > 1 else None
                if isinstance(rows, int) and stored.is_initializer():
                    yield rows
            elif node.op_type in _CARRIERS - without and node.outputs[0] not in visited:
                visited.add(node.outputs[0])
                pending.append(node.outputs[0])


def _stored(table: ir.Value) -> ir.Value:
    """The tensor that a table is stored as."""
    node = table.producer()
    while node is not None and node.op_type in _STORED_FORMS and node.inputs[0] is not None:
        table = node.inputs[0]
        node = table.producer()
    return table


def id_limits(model: ir.Model) -> dict[str, int]:
    """Number of ids of the smallest table that each input indexes; inputs that index none are left out."""
    sizes = {str(value.name): min(table_sizes(value, without=_BOUNDING), default=0) for value in model.graph.inputs}
    return {name: size for name, size in sizes.items() if size}


def require_ids(arrays: Mapping[str, np.ndarray], limits: Mapping[str, int], source: str) -> None:
    """Check that every id has a row in the table that it indexes; runtimes would read other memory, or fail.

    Args:
        arrays: input name -> array `[row, ...]`.
        limits: those of `id_limits`.
        source: name of the rows in error messages.

    Raises:
        InputError: an id has no row; negative ids count from the end of the table.
    """
    for name, size in limits.items():
        array = arrays.get(name)
        if array is None or not array.size or array.dtype.kind not in "iu":
            continue
        outside = (array >= size) | (array < -size)
        if outside.any():
            position = np.argwhere(outside)[0]
            number = int(array[tuple(position)])
            raise RowError.of(
                source,
                int(position[0]) + 1 if array.ndim else 1,
                f"{name} has the id {number}, outside of the graph's embedding table of {size} rows; give ids of the "
                f"tokenizer that the model was trained with, or export the model with a table for all of its tokens",
                code=ErrorCode.ID_OUTSIDE_TABLE,
                input=name,
                id=number,
                size=size,
            )
