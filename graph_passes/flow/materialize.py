"""Compute zeros or repeated rows of a known shape from the sizes of the graph's inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe, Shape
from graph_passes.flow.edit import ints


def materialize(
    graph: ir.Graph, like: ir.Value, rows: ir.Value | None, before: ir.Node, probe: Probe
) -> ir.Value | None:
    """A tensor in the shape of another: zeros, or rows that are repeated.

    Sizes are read from the graph's inputs, else from the first tensor of that shape, so that no dropped tensor is
    computed only for its shape.

    Args:
        graph: the graph that nodes are added to.
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
    nodes: list[ir.Node] = []
    parts: list[ir.Value] = []
    behind = _inputs_behind(like)
    inputs = sorted(graph.inputs, key=lambda value: value not in behind)  # equal sizes may be those of two batches
    for sizes in zip(first, second, strict=True):
        part = _size(inputs, sizes, nodes, probe)
        if part is None:
            break
        parts.append(part)
    if len(parts) == len(first):
        nodes.append(ir.node("Concat", parts, {"axis": 0}))
    else:
        same_shape = _first_of_shape(graph, (first, second), before, probe)
        if same_shape is None or same_shape is like:
            return None
        nodes = [ir.node("Shape", [same_shape])]
    shape = nodes[-1].outputs[0]
    dtype = ir.DataType.FLOAT if like.dtype is None else like.dtype
    if rows is None:
        nodes.append(ir.node("Constant", [], {"value": ir.tensor(np.zeros((), dtype.numpy()), dtype=dtype)}))
        rows = nodes[-1].outputs[0]
    nodes.append(ir.node("Expand", [rows, shape]))
    graph.insert_before(before, nodes)
    result = nodes[-1].outputs[0]
    result.dtype = dtype
    probe.copy_shape(result, like)
    return result


def _inputs_behind(value: ir.Value) -> set[ir.Value]:
    """The inputs of the graph that a tensor is computed from."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        producer = current.producer()
        pending += [source for source in (producer.inputs if producer is not None else ()) if source is not None]
    return {current for current in seen if current.is_graph_input()}


def _size(inputs: Sequence[ir.Value], sizes: tuple[int, int], nodes: list[ir.Node], probe: Probe) -> ir.Value | None:
    """The size of one axis as a tensor `[1]`: a constant, an input's size, or a product of the two.

    Args:
        inputs: the inputs of the graph, the first of a size first.
        sizes: the size under both assignments.
        nodes: the list that new nodes are appended to.
        probe: the graph's shapes.
    """
    if sizes[0] == sizes[1]:
        nodes.append(ints([sizes[0]]))
        return nodes[-1].outputs[0]
    for value in inputs:
        first, second = probe.shapes(value)
        for axis, input_sizes in enumerate(zip(first or (), second or (), strict=True)):
            if input_sizes[0] == input_sizes[1] or sizes[0] % input_sizes[0] or sizes[1] % input_sizes[1]:
                continue
            quotients = (sizes[0] // input_sizes[0], sizes[1] // input_sizes[1])
            factor_nodes: list[ir.Node] = []
            factor = _size(inputs, quotients, factor_nodes, probe) if quotients != (1, 1) else None
            if quotients != (1, 1) and factor is None:
                continue
            shape, position = ir.node("Shape", [value]), ints([axis])
            size = ir.node("Gather", [shape.outputs[0], position.outputs[0]], {"axis": 0})
            nodes.extend([*factor_nodes, shape, position, size])
            if factor is not None:
                nodes.append(ir.node("Mul", [size.outputs[0], factor]))
            return nodes[-1].outputs[0]
    return None


def _first_of_shape(graph: ir.Graph, shapes: tuple[Shape, Shape], before: ir.Node, probe: Probe) -> ir.Value | None:
    """The first computed tensor of a shape among those before a node; None if there is none."""
    for node in graph:
        if node is before:
            return None
        for value in node.outputs:
            if probe.shapes(value) == shapes:
                return value
    return None
