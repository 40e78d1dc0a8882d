"""Tables of keys: where block-sparse attention finds the keys and values of each block and head, and their masks.

Positions are gathered one by one and clipped to those that exist, so nothing is padded and no layout changes: a tensor
`[batch, position, head, dim]` is read as `[batch, position * head, dim]`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from graph_passes.block_sparse.spec import AttentionInputs, AttentionSpec, GraphBuilder, Sizes

_REUSED = 2
"""Average number of uses of a key block above which it is faster to gather all blocks first."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """Keys or values.

    Attributes:
        table: blocks `[batch, key block * head + 1, position in block, dim]`, or tokens `[batch, key * head, dim]`.
        tokens: index of each block's tokens, `[key block * head + 1, position in block]`; None: the table has blocks.
        dim: width of one vector.
        vectors: the persistent vectors, `[batch, head, persistent, dim]`; None: there are no persistent vectors.
    """

    table: ir.Value
    tokens: ir.Value | None
    dim: int
    vectors: ir.Value | None

    def gather(self, op: GraphBuilder, blocks: ir.Value) -> ir.Value:
        """The vectors of blocks `[row, column]`: `[batch, row, column * position in block, dim]`."""
        index = blocks if self.tokens is None else op("Gather", self.tokens, blocks, axis=0)
        return op("Reshape", op("Gather", self.table, index, axis=1), op.ints([0, 0, -1, self.dim]))


@dataclasses.dataclass(frozen=True)
class KeyTables:
    """The tables that buckets gather from, by block and head. The last entry of each is hidden, and pads rows.

    Attributes:
        key, value: keys and values.
        added: addends of the scores, `[batch or 1, key block * head + 1, position in block]`.
        added_persistent: addends of the scores of persistent keys, `[batch or 1, 1, 1, persistent]`.
        hidden_block: index of the last entry, `[1]`.
        full: the mask of pairs, `[batch or 1, query (and head) * key block, position in block]`; None: there is none.
        full_persistent: the mask of pairs with persistent keys, `[batch or 1, query (and head), persistent]`; None:
            there is none.
    """

    key: Operand
    value: Operand
    added: ir.Value
    added_persistent: ir.Value
    hidden_block: ir.Value
    full: ir.Value | None
    full_persistent: ir.Value | None


def build_key_tables(op: GraphBuilder, spec: AttentionSpec, inputs: AttentionInputs, sizes: Sizes) -> KeyTables:
    """Record the nodes that build the tables."""
    position = _key_positions(op, spec, sizes)
    token = op("Mul", op("Min", position, op("Sub", sizes.keys, op.ints([1]))), op.ints(spec.heads))
    token = op("Reshape", op("Add", token, op.ints(np.arange(spec.heads)[:, None])), op.ints([-1, spec.block]))
    token = op("Concat", token, op.ints(np.zeros((1, spec.block))), axis=0)
    uses = int(np.delete(spec.kept, spec.whole_heads, axis=0).sum())
    gather_first = uses > _REUSED * spec.heads * spec.columns
    key, value = (
        _operand(op, spec, operand, dim, token, gather_first=gather_first)
        for operand, dim in ((inputs.key, spec.head_dim), (inputs.value, spec.value_dim))
    )
    added, added_persistent = _added(op, spec, inputs.row, position, sizes)
    hidden_block = op("Mul", sizes.key_blocks, op.ints([spec.heads]))
    full, full_persistent = _full_tables(op, spec, inputs.full, sizes)
    return KeyTables(key, value, added, added_persistent, hidden_block, full, full_persistent)


def _key_positions(op: GraphBuilder, spec: AttentionSpec, sizes: Sizes) -> ir.Value:
    """Index of each block's keys, `[key block, 1, position in block]`; the number of keys where a key is missing."""
    first = op("Mul", op("Range", op.ints(0), op.scalar(sizes.key_blocks), op.ints(1)), op.ints(spec.block))
    position = op("Add", op("Unsqueeze", first, op.ints([1])), op.ints(np.arange(spec.block)))
    if sizes.missing is not None:
        position = op("Sub", position, sizes.missing)
        position = op("Where", op("Less", position, op.ints([0])), sizes.keys, position)
    return op("Unsqueeze", op("Min", position, sizes.keys), op.ints([1]))


def _operand(
    op: GraphBuilder, spec: AttentionSpec, operand: ir.Value, dim: int, token: ir.Value, *, gather_first: bool
) -> Operand:
    """The table of keys or values `[batch, key, head, dim]`, of which each bucket or one node before gathers blocks."""
    tokens = op("Reshape", operand, op.ints([0, -1, dim]))
    table, index = (op("Gather", tokens, token, axis=1), None) if gather_first else (tokens, token)
    vectors = _split_persistent(op, spec, operand, 1)[1]
    if vectors is not None:
        vectors = op("Transpose", vectors, perm=[0, 2, 1, 3])
    return Operand(table, index, dim, vectors)


def _added(
    op: GraphBuilder, spec: AttentionSpec, row: ir.Value | None, position: ir.Value, sizes: Sizes
) -> tuple[ir.Value, ir.Value]:
    """The addends of the scores for each block and head, and for persistent keys; see `KeyTables`."""
    row, persistent = _split_persistent(op, spec, row, 3)
    if row is None:
        row = op("Expand", op.floats([[0.0]]), op("Concat", op.ints([1]), sizes.keys, axis=0))
    else:
        row = op("Max", op("Reshape", row, op.ints([0, -1])), op.floats(spec.hidden))
    row = op("Pad", row, op.ints([0, 0, 0, 1]), op.floats(spec.hidden))
    per_head = op("Reshape", op("Expand", position, op.ints([1, spec.heads, 1])), op.ints([-1, spec.block]))
    filler = op("Expand", sizes.keys, op.ints([1, spec.block]))
    added = op("Gather", row, op("Concat", per_head, filler, axis=0), axis=1)
    if persistent is None:
        persistent = op.floats(np.zeros((1, 1, 1, spec.persistent)))
    return added, persistent


def _full_tables(
    op: GraphBuilder, spec: AttentionSpec, full: ir.Value | None, sizes: Sizes
) -> tuple[ir.Value | None, ir.Value | None]:
    """The mask of pairs by key block, and for persistent keys; see `KeyTables`."""
    full, persistent = _split_persistent(op, spec, full, 3)
    if full is not None:
        before = op.ints([0]) if sizes.missing is None else sizes.missing
        after = op("Sub", op("Mul", sizes.key_blocks, op.ints([spec.block])), op("Add", sizes.keys, before))
        zeros = op.ints([0, 0, 0])
        full = op("Pad", full, op("Concat", zeros, before, zeros, after, axis=0))
        # 0 copies the size of the batch, which may be one; the key blocks of one query are consecutive.
        full = op("Reshape", full, op.ints([0, -1, spec.block]))
    if persistent is not None:
        persistent = op("Reshape", persistent, op.ints([0, -1, spec.persistent]))
    return full, persistent


def _split_persistent(
    op: GraphBuilder, spec: AttentionSpec, value: ir.Value | None, axis: int
) -> tuple[ir.Value | None, ir.Value | None]:
    """The parts of a tensor for keys that have a position, and for the persistent keys after them."""
    if value is None or not spec.persistent:
        return value, None
    start, end, along = op.ints([0]), op.ints([-spec.persistent]), op.ints([axis])
    last = op.ints([np.iinfo(np.int64).max])
    return op("Slice", value, start, end, along), op("Slice", value, end, last, along)
