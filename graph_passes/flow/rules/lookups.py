"""Operators that look up elements, slices or points of images by computed positions."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.flow.rule import Rule, RuleContext
from graph_passes.flow.rules.labels import AxisLabels, LabelRule, Labels


def _elements(node: ir.Node, context: RuleContext) -> Labels:
    """GatherElements: each output element comes from the same position of the table on every axis but one.

    The indices have the shape of the output, and may cover only a part of the other axes of the table.
    """
    table, output = node.inputs[0], node.outputs[0]
    looked_up = node.attributes.get_int("axis", 0) % len(context.shape(table))
    axes = tuple(range(len(context.shape(output))))
    of_table: AxisLabels = tuple(
        "looked up" if axis == looked_up else None if context.is_broadcast(table, axis, output, axis) else axis
        for axis in axes
    )
    return Labels((of_table, axes), (axes,), frozenset((0,)), mixed=frozenset(("looked up",)))


def _slices(node: ir.Node, context: RuleContext) -> Labels:
    """GatherND: the last axis of the indices holds positions on the axes of the table that follow the batch axes."""
    table, indices = context.shape(node.inputs[0]), context.shape(node.inputs[1])
    batch = node.attributes.get_int("batch_dims", 0)
    shared = tuple(("batch", axis) for axis in range(batch))
    positions = tuple(("index", axis) for axis in range(batch, len(indices) - 1))
    looked_up = tuple(("looked up", axis) for axis in range(batch, batch + indices[-1]))
    rest = tuple(("table", axis) for axis in range(batch + indices[-1], len(table)))
    inputs = ((*shared, *looked_up, *rest), (*shared, *positions, None))
    return Labels(inputs, ((*shared, *positions, *rest),), frozenset((0,)), mixed=frozenset(looked_up))


def _points(node: ir.Node, context: RuleContext) -> Labels:
    """GridSample: rows and channels stay apart, and each point mixes the pixels around it.

    Deformable attention samples the values `[row * head, width, ...]` at points `[row * head, ..., 2]`.
    """
    rank = len(context.shape(node.inputs[0]))
    pixels = tuple(("pixels", axis) for axis in range(2, rank))
    points = tuple(("points", axis) for axis in range(2, rank))
    inputs = (("row", "channel", *pixels), ("row", *points, "coordinates"))
    return Labels(inputs, (("row", "channel", *points),), frozenset((0,)), mixed=frozenset((*pixels, "coordinates")))


RULES: dict[tuple[str, str], Rule] = {
    ("", "GridSample"): LabelRule(_points),
    ("", "GatherElements"): LabelRule(_elements),
    ("", "GatherND"): LabelRule(_slices),
}
