"""Make zeros or repeated rows of a known shape, from the sizes of the graph's inputs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.flow.concrete_shapes import Probe, Shape
from graph_passes.flow.edit import ints


def fill(graph: ir.Graph, like: ir.Value, rows: ir.Value | None, before: ir.Node, probe: Probe) -> ir.Value | None:
    """Zeros, or rows repeated, in the shape of `like`, made just before a node; None if nothing tells the shape.

    The sizes come from the graph's inputs, else from the first tensor of that shape, so that nothing that a plan drops
    has to be computed for its shape.
    """
    one, other = probe.shapes(like)
    if not one or not other:
        return None
    nodes: list[ir.Node] = []
    parts: list[ir.Value] = []
    for size in zip(one, other, strict=True):
        part = _size(graph, size, nodes, probe)
        if part is None:
            break
        parts.append(part)
    if len(parts) == len(one):
        nodes.append(ir.node("Concat", parts, {"axis": 0}))
    else:
        known = _first_of_shape(graph, (one, other), before, probe)
        if known is None or known is like:
            return None
        nodes = [ir.node("Shape", [known])]
    shape = nodes[-1].outputs[0]
    dtype = ir.DataType.FLOAT if like.dtype is None else like.dtype
    if rows is None:
        nodes.append(ir.node("Constant", [], {"value": ir.tensor(np.zeros((), dtype.numpy()), dtype=dtype)}))
        rows = nodes[-1].outputs[0]
    nodes.append(ir.node("Expand", [rows, shape]))
    graph.insert_before(before, nodes)
    made = nodes[-1].outputs[0]
    made.dtype = dtype
    probe.stand_in(made, like)
    return made


def _size(graph: ir.Graph, size: tuple[int, int], nodes: list[ir.Node], probe: Probe) -> ir.Value | None:
    """One axis's size (in both walks) as a tensor `[1]`: a constant, an input's size, or a product of two of these."""
    if size[0] == size[1]:
        nodes.append(ints([size[0]]))
        return nodes[-1].outputs[0]
    for value in graph.inputs:
        one, other = probe.shapes(value)
        for axis, found in enumerate(zip(one or (), other or (), strict=True)):
            if found[0] == found[1] or size[0] % found[0] or size[1] % found[1]:
                continue
            rest = (size[0] // found[0], size[1] // found[1])
            taken: list[ir.Node] = []
            factor = _size(graph, rest, taken, probe) if rest != (1, 1) else None
            if rest != (1, 1) and factor is None:
                continue
            sizes = ir.node("Shape", [value])
            place = ints([axis])
            nodes.extend([*taken, sizes, place, ir.node("Gather", [sizes.outputs[0], place.outputs[0]], {"axis": 0})])
            if factor is not None:
                nodes.append(ir.node("Mul", [nodes[-1].outputs[0], factor]))
            return nodes[-1].outputs[0]
    return None


def _first_of_shape(graph: ir.Graph, shapes: tuple[Shape, Shape], before: ir.Node, probe: Probe) -> ir.Value | None:
    for node in graph:
        if node is before:
            return None
        for value in node.outputs:
            if probe.shapes(value) == shapes:
                return value
    return None
