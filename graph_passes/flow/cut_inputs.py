"""Cut an input of a node from the indices that it holds to those that the node needs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.flow.edit import cut_value, cut_value_of_rows, positions_among
from graph_passes.flow.indices import Index, Need, part_of_each_row, positions_of, same_index
from graph_passes.flow.rule import RuleContext
from graph_passes.flow.sizes import BATCH


def cut_input(value: ir.Value, held: Need, need: Need, node: ir.Node, context: RuleContext) -> ir.Value:
    """A tensor cut before the node that reads it.

    Where an axis merges rows with heads, its size depends on the graph's inputs, and the positions are computed.

    Args:
        value: the tensor.
        held: the indices that it holds.
        need: the indices that the node needs.
        node: the node.
        context: the shapes of the unpruned graph.
    """
    result = value
    for axis, (index, held_index) in enumerate(zip(need, held, strict=True)):
        if index is None or same_index(held_index, index):
            continue
        positions = positions_among(index, held_index)
        count, rows = len(positions_of(held_index, context.shape(value)[axis])), _rows_of(value, axis, context)
        part = part_of_each_row(np.asarray(positions), count, rows) if rows else None
        if part is None:
            result = cut_value(result, axis, positions, node)
        else:
            result = cut_value_of_rows(result, axis, part, count // rows, node)
    if result is not value:
        context.probe.copy_shape(result, value)
    return result


def can_cut(value: ir.Value, axis: int, held_index: Index, index: Index, context: RuleContext) -> bool:
    """Whether an axis can be cut from what a tensor holds to what a node needs, at any size of the inputs.

    Where an axis merges rows with heads, every row has to need the same heads, and to have as many at any size: a row
    that holds positions beside the heads is not cut.

    Args:
        value: the tensor.
        axis: the axis.
        held_index: the indices of the axis that the tensor holds.
        index: the indices of the axis that the node needs.
        context: the shapes of the unpruned graph.
    """
    rows = _rows_of(value, axis, context)
    if index is None or not rows or same_index(held_index, index):
        return True
    first, second = context.probe.shapes(value)
    if first is None or second is None or first[axis] * BATCH[1] != second[axis] * BATCH[0]:
        return False
    count = len(positions_of(held_index, context.shape(value)[axis]))
    return part_of_each_row(np.asarray(positions_among(index, held_index)), count, rows) is not None


def _rows_of(value: ir.Value, axis: int, context: RuleContext) -> int:
    """Number of rows that an axis merges with heads under the first assignment of sizes; 0 if it holds heads only."""
    return 0 if context.counts_positions or context.probe.fixed(value, axis) else BATCH[0]
