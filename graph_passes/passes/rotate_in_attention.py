"""Rotate in attention: rotate queries and keys by `GroupQueryAttention` itself."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graph_passes.attention.mask_meaning import evaluate
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.passes.base import GraphPass, Names, ReportedResult, changed
from graph_passes.passes.name_decoding_axes import IDS, MASK, POSITIONS
from graph_passes.tape import Tape, ancestors, producer_of, source_before

_ATTENTION, _ROTATION = "GroupQueryAttention", "RotaryEmbedding"
_MOVES = frozenset(("Gather", "Reshape", "Transpose"))
"""Operators between a rotation and an attention that select or move heads."""
_SAMPLE = 16
"""Number of positions at which tables are computed."""
_FIRST = (0, 4096)
"""First of these positions: some tables change beyond the length that the model was trained on."""
_TOLERANCE = 1e-3
"""Largest difference between the turns of two positions and the next two."""
_WIDTHS = 8
"""Divisor of half the width of a head that the operator rotates."""
_TABLES = (7, 8)
"""Inputs of the attention with the cosines and sines of each position `[position, half of a width]`."""


class RotateInAttention(GraphPass[Names]):
    """Replace `RotaryEmbedding` before `GroupQueryAttention` by tables that the operator reads.

    The operator numbers positions by their index in the caches, with the padding on the left, which the graph did not
    count before. Scores stay the same if all positions turn by equal angles, since they depend on the angle between
    query and key.

    Cases:
        1. The graph rotates the queries and keys of such attentions and nothing else, as `FuseRotaryEmbedding` writes
           it, and its tables are computed from `position_ids`, which nothing else reads, and turn by equal angles: the
           input is removed. An attention rotates its inputs; rotations whose heads are selected afterwards stay.
        2. Other graphs stay.

    The report has the names of the attentions that rotate.
    """

    inlined = True

    def call(self, model: ir.Model) -> ReportedResult[Names]:
        inputs = {value.name: value for value in model.graph.inputs}
        positions, mask, ids = (inputs.get(name) for name in (POSITIONS, MASK, IDS))
        attentions = [node for node in model.graph if node.op_type == _ATTENTION]
        pairs = [[_rotation(value) for value in node.inputs[:2]] for node in attentions]
        rotations = {node for pair in pairs if None not in pair for node in pair if node is not None}
        if positions is None or mask is None or ids is None or not rotations:
            return changed(model, ())
        if rotations != {node for node in model.graph if node.op_type == _ROTATION}:
            return changed(model, ())
        if not all(_turn_equally(model, tables, positions) for tables in {_tables(node) for node in rotations}):
            return changed(model, ())
        op, probe = Tape(), Probe(model)
        end = op.size(mask, 1)
        start = op("Sub", end, op.size(ids, 1))
        places = op("Range", op("Squeeze", start), op("Squeeze", end), op.constant(np.array(1, np.int64)))
        positions.replace_all_uses_with(op("Unsqueeze", places, op.ints([0])))
        op.insert_before(model.graph[0])
        model.graph.inputs.remove(positions)
        rewriter = _Rewriter(start, probe)
        names = [node.name for node, pair in zip(attentions, pairs, strict=True) if rewriter.rotate(node, pair)]
        model.graph.sort()
        RemoveUnusedNodesPass()(model)
        return changed(model, names, is_other=True)


def _rotation(value: ir.Value | None) -> ir.Node | None:
    """The rotation of the heads that a tensor has; None: they are not rotated."""
    node = producer_of(source_before(value, _MOVES))
    return node if node is not None and node.op_type == _ROTATION and len(node.outputs[0].uses()) == 1 else None


def _tables(rotation: ir.Node) -> tuple[ir.Value, ...]:
    """Cosines and sines `[batch or 1, 1, position, half of a width]` of a rotation; empty where it has others."""
    tables = []
    for rows in rotation.inputs[2:4]:
        reshape = producer_of(rows)
        expand = producer_of(reshape.inputs[0]) if reshape is not None else None
        if reshape is None or expand is None or (reshape.op_type, expand.op_type) != ("Reshape", "Expand"):
            return ()
        tables += [value for value in expand.inputs[:1] if value is not None]
    return tuple(tables)


def _turn_equally(model: ir.Model, tables: Collection[ir.Value], positions: ir.Value) -> bool:
    """Whether tables are computed from positions alone, which no others read, and turn by equal angles."""
    behind = ancestors(tables)
    nodes = [node for node in model.graph if behind & set(node.outputs)]
    leaves = {value for value in behind if value.producer() is None and value.const_value is None}
    if not tables or leaves != {positions} or not {node for node, _ in positions.uses()} <= set(nodes):
        return False
    dtype = (positions.dtype or ir.DataType.INT64).numpy()
    turns = list[np.ndarray]()
    for first in _FIRST:
        feeds = {positions: np.arange(first, first + _SAMPLE, dtype=dtype)[None]}
        contents = [evaluate(table, nodes, feeds) for table in tables]
        if any(content is None or content.ndim != 4 for content in contents):
            return False
        cos, sin = (content[0, 0] for content in contents if content is not None)
        turns.append((cos + 1j * sin)[1:] * (cos - 1j * sin)[:-1])
    every = np.concatenate(turns)
    return bool(np.abs(every - every[0]).max() <= _TOLERANCE * np.abs(every).max())


class _Rewriter:
    """Moves rotations into attentions, which share their tables; `start` is the number of earlier positions."""

    def __init__(self, start: ir.Value, probe: Probe) -> None:
        self._start, self._probe = start, probe
        self._rows: dict[ir.Value, ir.Value] = {}

    def rotate(self, attention: ir.Node, pair: list[ir.Node | None]) -> bool:
        """Let an attention rotate its queries and keys, if it reads them as they are rotated."""
        query, key = pair
        if query is None or key is None or (tables := _tables(query)) != _tables(key):
            return False
        half = (self._probe.shape(tables[0]) or (1,))[-1]
        if attention.inputs[0] is not query.outputs[0] or attention.inputs[1] is not key.outputs[0] or half % _WIDTHS:
            return False
        op = Tape()
        for position, table in zip(_TABLES, tables, strict=True):
            if table not in self._rows:
                rows = op("Reshape", table, op.ints([-1, half]))
                before = op("Concat", self._start, op.ints([0, 0, 0]), axis=0)
                self._rows[table] = op("Pad", rows, before)  # the operator reads the rows of new positions alone
            attention.replace_input_with(position, self._rows[table])
        op.insert_before(attention)
        for position, rotation in enumerate((query, key)):
            attention.replace_input_with(position, rotation.inputs[0])
        attention.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
        return True
