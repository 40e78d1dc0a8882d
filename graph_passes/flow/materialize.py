"""Compute zeros or repeated rows of a known shape from the sizes of the graph's inputs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe, Shapes
from graph_passes.tape import Tape, ancestors


def materialize(
    graph: ir.Graph, like: ir.Value, rows: ir.Value | None, before: ir.Node, probe: Probe
) -> ir.Value | None:
    """A tensor in the shape of another: zeros, or rows that are repeated.

    Sizes are read from the graph's inputs, else from the first tensor of that shape, so that no dropped tensor is
    computed only for its shape.

    Args:
        like: the tensor whose shape and type the new one has.
        rows: a tensor that broadcasts to the shape; None: zeros.
        before: the node before which the new nodes are inserted.
        probe: the graph's shapes; the new tensor's are added.

    Returns:
        The new tensor, or None where the graph does not determine the shape.
    """
    first, second = probe.shapes(like)
    if not first or not second:
        return None
    op, behind = Tape(), ancestors([like])
    inputs = sorted(graph.inputs, key=lambda value: value not in behind)  # equal sizes may be those of two batches
    factors = [_factors(inputs, sizes, probe) for sizes in zip(first, second, strict=True)]
    if None in factors:
        same_shape = _first_of_shape(graph, (first, second), before, probe)
        if same_shape is None or same_shape is like:
            return None
        shape = op("Shape", same_shape)
    else:
        shape = op("Concat", *(_product(of_axis, op) for of_axis in factors if of_axis is not None), axis=0)
    dtype = ir.DataType.FLOAT if like.dtype is None else like.dtype
    if rows is None:
        rows = op("Constant", value=ir.tensor(np.zeros((), dtype.numpy()), dtype=dtype))
    result = op("Expand", rows, shape)
    op.insert_before(before)
    result.dtype = dtype
    probe.copy_shape(result, like)
    return result


_Factors = list[int | tuple[ir.Value, int]]
"""Factors of a size: numbers, and the sizes of axes of inputs."""


def _factors(inputs: Sequence[ir.Value], sizes: tuple[int, int], probe: Probe) -> _Factors | None:
    """The factors of a size that has these values under both assignments; None: inputs do not determine it."""
    if sizes[0] == sizes[1]:
        return [sizes[0]]
    for value in inputs:
        first, second = probe.shapes(value)
        for axis, (a, b) in enumerate(zip(first or (), second or (), strict=True)):
            if a == b or sizes[0] % a or sizes[1] % b:
                continue
            quotients = (sizes[0] // a, sizes[1] // b)
            others: _Factors | None = [] if quotients == (1, 1) else _factors(inputs, quotients, probe)
            if others is not None:
                return [(value, axis), *others]
    return None


def _product(factors: _Factors, op: Tape) -> ir.Value:
    """A product as a tensor `[1]`."""
    sizes = (op.ints([factor]) if isinstance(factor, int) else op.size(*factor) for factor in reversed(factors))
    return functools.reduce(lambda product, size: op("Mul", size, product), sizes)


def _first_of_shape(graph: ir.Graph, shapes: Shapes, before: ir.Node, probe: Probe) -> ir.Value | None:
    """The first computed tensor of a shape among those before a node; None if there is none."""
    nodes = itertools.takewhile(lambda node: node is not before, graph)
    return next((value for node in nodes for value in node.outputs if probe.shapes(value) == shapes), None)
