"""Inputs on which a graph is tried, proven and timed: its example rows where it has any, else drawn at random."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from compressor.targets.example_rows import read_example_rows
from compressor.targets.random_inputs import is_id, random_feeds


def trial_feeds(
    model: ir.Model, batch: int, seq: int, *, memory: int | None = None, seed: int = 0, padded: bool = False
) -> dict[str, np.ndarray]:
    """One batch of inputs for a graph, in a form that the model can have where the graph carries example rows.

    Inputs without example rows are random; see `random_feeds`.

    Args:
        model: the graph.
        batch: size of free first axes.
        seq: size of every other free axis, except those of caches, memories, images and sounds.
        memory: positions of memories; None: the longest that the model takes, or `seq` where that is unknown.
        seed: seed of the random numbers, and number of the first example row that is used.
        padded: whether to mask the last quarter of every second row, at least one position, where there is a mask.

    Returns:
        Input name -> array.

    Raises:
        InputError: the graph fixes another batch size, or its metadata are damaged.
    """
    feeds = random_feeds(model, batch, seq, memory=memory, seed=seed, padded=padded)
    example = read_example_rows(model)
    if example is None:
        return feeds
    inputs = {name: rows for name, rows in example.inputs.items() if name in feeds}
    lengths = {name: feeds[name].shape[-1] for name in inputs if feeds[name].ndim}
    text = next((value for value in model.graph.inputs if value.name == "input_ids"), None)
    if text is not None and text.shape is not None and isinstance(text.shape[-1], ir.SymbolicDim):
        lengths["input_ids"] = lengths.get("input_ids", 0) + example.image_positions
    rows = range(batch - 1, -1, -2) if padded else ()
    sized = dataclasses.replace(example, inputs=inputs).sized(batch, lengths, first=seed, padded=rows)
    fitting = (value for value in model.graph.inputs if value.name in sized and _fits(value, sized[value.name or ""]))
    return feeds | {
        value.name or "": sized[value.name or ""].astype(feeds[value.name or ""].dtype) for value in fitting
    }


def draws_ids(model: ir.Model) -> bool:
    """Whether `trial_feeds` draws ids at random, which the model may not be able to have: no example row has them."""
    example = read_example_rows(model)
    stored = example.inputs if example is not None else ()
    return any(is_id(value) and value.name not in stored for value in model.graph.inputs)


def has_random_inputs(model: ir.Model) -> bool:
    """Whether the inputs of `trial_feeds` are random: ids, or all of them, such as images."""
    example = read_example_rows(model)
    return draws_ids(model) or example is None or not example.inputs


def _fits(value: ir.Value, array: np.ndarray) -> bool:
    """Whether an array has the axes of an input, and the sizes that the graph fixes."""
    shape = value.shape
    if shape is None or len(shape) != array.ndim:
        return False
    return all(isinstance(dim, ir.SymbolicDim) or dim == size for dim, size in zip(shape, array.shape, strict=True))
