"""Count positions: read the numbers of texts and positions from the mask and the ids of a decoder alone."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graph_passes.flow.caches import read_caches
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.passes.name_decoding_axes import IDS, MASK, POSITIONS
from graph_passes.tape import Tape, shape_axes

_TEXTS, _POSITIONS = 0, 2
"""The free axes of a cache `[text, head, position, width]`."""


class CountPositions(GraphPass[Names]):
    """Compute the sizes of caches and of `position_ids` from `attention_mask` and `input_ids`.

    The caches may then have room for further positions. The mask has one number for every earlier and new position, and
    the ids are those of the new positions.

    Cases:
        1. A `Shape` of a cache that the graph reads or returns: the numbers of texts and positions are replaced.
        2. A `Shape` of `position_ids`, whose axes are those of the ids, reads the ids.
        3. A graph without these two inputs stays.

    The report has the names of the nodes that read other sizes now.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        inputs, caches = {value.name: value for value in model.graph.inputs}, read_caches(model)
        mask, ids = inputs.get(MASK), inputs.get(IDS)
        if mask is None or ids is None or any(len(value.shape or ()) != 2 for value in (mask, ids)):
            return changed(model, ())
        op = Tape()
        every = op.size(mask, 1)
        earlier = op("Sub", every, op.size(ids, 1))
        nodes = [
            node
            for cache, present in caches.items()
            if present is not None
            for value, length in ((cache, earlier), (present, every))
            for node in _shapes(value)
            if _replace(op, node, (op.size(mask, 0), length))
        ]
        if nodes:
            op.insert_before(model.graph[0])
            model.graph.remove(nodes, safe=True)
            RemoveUnusedNodesPass()(model)
        return changed(model, [node.name for node in (*nodes, *_read_ids(inputs.get(POSITIONS), ids))])


def _read_ids(positions: ir.Value | None, ids: ir.Value) -> list[ir.Node]:
    """Let what reads the sizes of the positions of tokens read those of the tokens; returns these nodes."""
    if positions is None or positions.shape is None or positions.shape != ids.shape:
        return []
    nodes = [node for node, _ in positions.uses() if node.op_type == "Shape"]
    for node in nodes:
        node.replace_input_with(0, ids)
    return nodes


def _shapes(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a free size of a cache."""
    return [node for node, _ in value.uses() if node.op_type == "Shape" and reads_free_size(node)]


def reads_free_size(shape: ir.Node) -> bool:
    """Whether a `Shape` of a cache has a free size of it."""
    return any(axis in shape_axes(shape, 4) for axis in (_TEXTS, _POSITIONS))


def _replace(op: Tape, node: ir.Node, free: tuple[ir.Value, ir.Value]) -> bool:
    """Replace texts and positions (`free`) among the sizes of a cache; returns whether the other sizes are fixed."""
    axes, cache = shape_axes(node, 4), node.inputs[0]
    assert cache is not None
    shape = list(cache.shape or (None,) * 4)
    fixed = {axis: shape[axis] for axis in axes if axis not in (_TEXTS, _POSITIONS)}
    if not all(isinstance(size, int) for size in fixed.values()):
        return False
    sizes = [op.ints([fixed[axis]]) if axis in fixed else free[axis // 2] for axis in axes]
    node.outputs[0].replace_all_uses_with(op("Concat", *sizes, axis=0) if len(sizes) > 1 else sizes[0])
    return True
